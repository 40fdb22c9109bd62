// The memory of a KV cache: one lazily committed mapping.
#pragma once

#include <cstdint>

namespace rworker {

/// Address space for the whole cache. A page is committed when a thread first writes it, so resident memory follows
/// use and lands on the writer's NUMA node; huge pages are asked for.
class Arena {
  public:
    explicit Arena(std::int64_t num_bytes);
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    std::uint8_t* data() const { return data_; }
    /// Commit the pages of these bytes, whose content stays; from any thread, while others read and write them. No
    /// effect where the system cannot.
    void commit(std::int64_t first_byte, std::int64_t num_bytes) const;

  private:
    std::int64_t num_bytes_;
    std::uint8_t* data_;
};

}  // namespace rworker
