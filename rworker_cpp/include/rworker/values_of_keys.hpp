// Values that are not stored, being the first dims of the keys: made for one split at a time, as kernels read them.
#pragma once

#include <cstdint>

#include "rworker/kernels.hpp"

namespace rworker {

/// Fills `view.split_values` with the values of tokens [begin, end), which lie in one split and end with it or with the
/// sequence: the first `value_dim` elements of their keys, in float32, float16 or bfloat16.
void make_values(DType dtype, const HeadView& view, std::int64_t begin, std::int64_t end, int key_dim, int value_dim);

}  // namespace rworker
