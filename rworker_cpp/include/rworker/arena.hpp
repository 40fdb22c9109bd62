// The memory of a KV cache: one lazily committed mapping.
#pragma once

#include <cstdint>

namespace rworker {

/// Address space for the whole cache. The system commits a page when a thread first writes it, so resident memory
/// follows use and lies on the writer's NUMA node. The arena asks for huge pages.
class Arena {
  public:
    explicit Arena(std::int64_t num_bytes);
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    std::uint8_t* data() const { return data_; }
    /// Commits the pages of these bytes and keeps their content. Any thread may call it while others read and write.
    /// Returns false if the system has no such call (Linux before 5.14) or no memory.
    bool commit(std::int64_t first_byte, std::int64_t num_bytes) const;
    /// False if `commit` always returns false.
    static bool can_commit();

  private:
    std::int64_t num_bytes_;
    std::uint8_t* data_;
};

}  // namespace rworker
