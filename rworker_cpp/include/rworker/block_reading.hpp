// Reads blocks from a file straight into their places, and computes their checksums.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "rworker/checksum.hpp"
#include "rworker/thread_pool.hpp"

namespace rworker {

/// Consecutive tokens of a sequence. Their blocks lie at `offset` of a file, in the order of `KVCache::export_blocks`.
struct FilePiece {
    std::int64_t num_tokens, offset;
    Checksum checksum;  // where the checksum starts; after reading, the checksum of the piece's bytes
};

/// One item per piece. A thread reads it in parts that stay in the processor's cache, and computes their checksum
/// there.
class ReadJob final : public Job {
  public:
    /// `places`: for each piece, where its bytes belong, in runs of multiples of kChecksumRow bytes.
    ReadJob(int fd, std::span<FilePiece> pieces, std::vector<std::vector<std::span<std::uint8_t>>> places);
    void run(std::int64_t piece, std::int64_t, int) noexcept override;
    /// 0, or an errno or kFileEnds of a piece that could not be read.
    int error() const { return error_.load(std::memory_order_relaxed); }

    static constexpr int kFileEnds = -1;

  private:
    bool read(std::span<std::uint8_t> bytes, std::int64_t offset) noexcept;

    int fd_;
    std::span<FilePiece> pieces_;
    std::vector<std::vector<std::span<std::uint8_t>>> places_;
    std::atomic<int> error_{0};
};

}  // namespace rworker
