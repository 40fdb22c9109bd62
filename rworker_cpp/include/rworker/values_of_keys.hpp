// Values that are not stored, being the first dims of the keys: made for one split at a time, as kernels read them.
#pragma once

#include <cstdint>

#include "rworker/kernels.hpp"
#include "rworker/kv_cache.hpp"

namespace rworker {

/// Fills `view.split_values` with the values of tokens [begin, end), which lie in one split and end with it or with the
/// sequence: the first `value_dim` elements of their keys, in float32, float16 or bfloat16.
void make_values(DType dtype, const HeadView& view, std::int64_t begin, std::int64_t end, int key_dim, int value_dim);

/// Bytes for the values of one split on a cache line of their own, where they are made of keys; 0 where no layer's are.
std::int64_t most_split_values(const KVCache& cache);

}  // namespace rworker
