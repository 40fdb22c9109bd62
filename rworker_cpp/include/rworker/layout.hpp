// How one layer's keys and values lie in a block; the same for every instruction set.
//
//   layer region   [block][kv head][keys | values]           each part a multiple of 64 bytes
//   keys           lanes are tokens, so that a query element is broadcast and no sum runs across lanes
//     float32, float16   [tile of 16 tokens][key_dim][16]
//     bfloat16           [tile][ceil(key_dim / 2)][16][2 dims]      the operand of a bfloat16 dot product
//   values         lanes are dims, padded to a multiple of 16
//     float32, float16   [token][value_dim16]
//     bfloat16           [token pair][value_dim16][2 tokens]
#pragma once

#include <cstdint>

#include "rworker/kernels.hpp"
#include "rworker/types.hpp"

namespace rworker {

struct LayerLayout {
    std::int64_t region_offset_bytes;  // of this layer in the arena
    std::int64_t block_bytes, head_bytes, values_offset_bytes;
    std::int64_t key_tile_bytes, value_tile_bytes;

    LayerLayout(const LayerSpec& layer, DType kv_dtype, std::int64_t block_size, std::int64_t region_offset);
};

/// Element index of (token in its tile, dim) in a key tile.
std::int64_t key_index(DType dtype, std::int64_t token, std::int64_t dim);

/// Element index of (token in its tile, dim) in a value tile.
std::int64_t value_index(DType dtype, std::int64_t token, std::int64_t dim, std::int64_t value_dim);

/// One stored element as float.
float load_element(DType dtype, const std::uint8_t* data, std::int64_t index);

}  // namespace rworker
