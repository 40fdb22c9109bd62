// What the machine gives: the ceilings every attention figure is read against.
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

/// What the kernels of a cache of this dtype multiply.
MultiplyAddKind multiply_add_kind(DType kv_dtype);

/// Threads like an R-worker's with a buffer of their own, so that measuring again costs one pass and no page fault.
class Peaks {
  public:
    /// `num_bytes` are read in each pass. Throws Error for sizes below 1 MB per thread and for an unknown `isa`.
    Peaks(int num_threads, std::int64_t num_bytes, std::vector<int> cores, const std::string& isa);

    /// GB/s (1e9 bytes) of the faster of two passes over the buffer, with the best instruction set there is: one that
    /// leaves it to the hardware to run ahead, one that asks for lines itself.
    double read();
    /// GB/s of reading the buffer in pieces of `piece_bytes` in random order, the next ones asked for as attention does
    /// with `read_ahead`, or, without, kStreams pages side by side and none asked for: the best of these is the ceiling
    /// of a cache in blocks. Throws Error for pieces below 64 bytes or above an eighth of the buffer.
    double read_scattered(std::int64_t piece_bytes, std::optional<ReadAhead> read_ahead);
    /// 1e9 multiply-adds per second of all threads together, with `isa`.
    double multiply_add(MultiplyAddKind kind);

  private:
    double read_once(bool ask);
    void scatter(std::int64_t piece_bytes);

    std::int64_t num_bytes_;
    std::int64_t piece_bytes_ = 0, page_bytes_ = 0;  // of `pages_`, pieces in random order
    std::vector<const std::uint8_t*> pages_;
    MultiplyAdds multiply_adds_;
    Arena arena_;
    ThreadPool pool_;  // last: its threads end before what they use
};

/// The median of `repeats` passes of `num_threads` unpinned threads over `num_bytes`, in GB/s.
double read_peak(int num_threads, std::int64_t num_bytes, int repeats);

}  // namespace rworker
