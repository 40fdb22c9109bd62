// What the memory gives: the ceiling every attention figure is read against.
#pragma once

#include <cstdint>

namespace rworker {

/// Read bandwidth in GB/s (1e9 bytes), the median of `repeats` passes of `num_threads` threads over a buffer of
/// `num_bytes`. Throws Error for sizes below 1 MB per thread.
double read_peak(int num_threads, std::int64_t num_bytes, int repeats);

}  // namespace rworker
