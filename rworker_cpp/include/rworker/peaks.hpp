// Peak speeds of this machine, with which attention's speed is compared.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "rworker/arena.hpp"
#include "rworker/multiply_add.hpp"
#include "rworker/thread_pool.hpp"
#include "rworker/types.hpp"

namespace rworker {

/// The operands that the kernels of a cache of this dtype multiply.
MultiplyAddKind multiply_add_kind(DType kv_dtype);

/// Threads like an R-worker's, with a buffer that is kept, so that another measurement costs one pass and no page
/// faults.
class Peaks {
  public:
    /// Each pass reads `num_bytes`. Throws Error for sizes below 1 MB per thread and for an unknown `isa`.
    Peaks(int num_threads, std::int64_t num_bytes, std::vector<int> cores, const std::string& isa);

    /// Returns GB/s (1e9 bytes) of the faster of two passes over the buffer, with the best instruction set: one relies
    /// on the hardware's prefetcher, the other prefetches lines itself.
    double read();
    /// Returns GB/s of reading the buffer in pieces of `piece_bytes` in random order. With `read_ahead`, the next
    /// pieces are prefetched as in attention. Without it, kStreams pages are read in parallel, without prefetch. The
    /// best of these is the peak of a cache in blocks. Throws Error for pieces below 64 bytes or above an eighth of the
    /// buffer.
    double read_scattered(std::int64_t piece_bytes, std::optional<ReadAhead> read_ahead);
    /// Returns 1e9 multiply-adds per second of all threads together, with `isa`.
    double multiply_add(MultiplyAddKind kind);

  private:
    double read_once(bool ask);
    void scatter(std::int64_t piece_bytes);

    std::int64_t num_bytes_;
    std::int64_t piece_bytes_ = 0, page_bytes_ = 0;  // of `pages_`, pieces in random order
    std::vector<const std::uint8_t*> pages_;
    MultiplyAdds multiply_adds_;
    Arena arena_;
    ThreadPool pool_;  // the last member, so its threads end before what they use is destroyed
};

/// Returns the median of `repeats` passes of `num_threads` unpinned threads over `num_bytes`, in GB/s.
double read_peak(int num_threads, std::int64_t num_bytes, int repeats);

}  // namespace rworker
