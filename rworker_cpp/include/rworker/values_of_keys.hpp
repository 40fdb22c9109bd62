// Makes keys and values that are not stored in the kernels' form, one split at a time: values that are the first dims
// of the keys, and keys of latent codes.
#pragma once

#include <cstdint>

#include "rworker/kernels.hpp"
#include "rworker/kv_cache.hpp"

namespace rworker {

/// Fills `view.split_values` with the values of tokens [begin, end): the first `value_dim` elements of their keys, in
/// float32, float16 or bfloat16. The tokens lie in one split and end with the split or with the sequence.
void make_values(DType dtype, const HeadView& view, std::int64_t begin, std::int64_t end, int key_dim, int value_dim);

/// Makes tiles of `model_dtype` in `memory` from rows of latent codes, and returns a view of them. The tokens lie in
/// one split and end with the split or with the sequence.
HeadView read_split(const Kernels& kernels, const LayerSpec& layer, DType stored, DType model_dtype,
                    const NextTokens& tokens, std::uint8_t* memory);

/// Bytes that one of these functions needs for a split, plus a cache line; 0 where values are stored.
std::int64_t most_split_bytes(const KVCache& cache, DType model_dtype);

}  // namespace rworker
