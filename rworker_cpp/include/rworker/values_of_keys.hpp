// Values that are not stored, being the first dims of the keys, and keys of latent codes: made for one split at a time,
// as kernels read them.
#pragma once

#include <cstdint>

#include "rworker/kernels.hpp"
#include "rworker/kv_cache.hpp"

namespace rworker {

/// Fills `view.split_values` with the values of tokens [begin, end), which lie in one split and end with it or with the
/// sequence: the first `value_dim` elements of their keys, in float32, float16 or bfloat16.
void make_values(DType dtype, const HeadView& view, std::int64_t begin, std::int64_t end, int key_dim, int value_dim);

/// Where rows are latent codes: makes tiles of `model_dtype` of the tokens, which lie in one split and end with it or with
/// the sequence, in `memory`, and says where.
HeadView read_split(const Kernels& kernels, const LayerSpec& layer, DType stored, DType model_dtype,
                    const NextTokens& tokens, std::uint8_t* memory);

/// Bytes that one of these needs for a split, with a cache line to spare; 0 where values are stored.
std::int64_t most_split_bytes(const KVCache& cache, DType model_dtype);

}  // namespace rworker
