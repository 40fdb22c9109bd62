// How one layer's keys and values lie in a block; the same for every instruction set.
//
//   layer region   [block][kv head][keys | values]           each part a multiple of 64 bytes
//   keys           lanes are tokens, so that a query element is broadcast and no sum runs across lanes
//     float32, float16   [tile of 16 tokens][key_dim][16]
//     bfloat16           [tile][ceil(key_dim / 2)][16][2 dims]      the operand of a bfloat16 dot product
//   Keys of a sequence's last tile, until it is full, have tokens and lines the other way round, [16][lines], in every
//   dtype: a new token is then one row, not a lane of every line. No other sequence holds such a tile.
//   values         lanes are dims, padded to a multiple of 16
//     float32, float16   [token][value_dim16]
//     bfloat16           [token pair][value_dim16][2 tokens]
//
// Where values are the first dims of the keys (multi-head latent attention), a block has keys alone; for each split that
// is attended to, value tiles are made of them in a thread's own memory (values_of_keys.hpp).
//
// Quantised tiles begin with their scales, 64 bytes to a line of 16 tokens, so that these stream with the codes.
//   int8   value = scale * (byte - 128), one scale for a token's keys and one for its values
//     keys     [tile] { [16] float32 scale;  [ceil(key_dim / 4)][16][4 dims] bytes }
//     values   [tile] { [16] float32 scale;  [token quad][value_dim16][4 tokens] bytes }
//   int4   value = zero + scale * code, per group of 64 dims (the last may be shorter) of a head that is rotated
//          before (kernels/rotate.hpp); a key's codes have a fifth bit, since keys lose more by their rounding
//     keys     [tile] { [group][16](bfloat16 scale, zero);  [ceil(key_dim / 32)][16] words;
//                       [ceil(key_dim / 8)][16][4] bytes }
//              byte j of octet l: dim 8l + j in its low nibble, dim 8l + 4 + j in its high one
//              bit 8j + i of word w: the fifth bit of dim 32w + 4i + j
//     values   [tile] { [group][16](bfloat16 scale, zero);  [token octet][value_dim16][4] bytes }
//              byte j of octet l: token 8l + j in its low nibble, token 8l + 4 + j in its high one
// Latent codes (values in keys, quantised): [token] { codes of the values;  scales as above;  further dims, bfloat16 },
// in every tile, full or not.
// A lane of 4 bytes splits into operands of integer products by a mask and a shift, whatever the width of a register.
#pragma once

#include <cstdint>

#include "rworker/kernels.hpp"
#include "rworker/types.hpp"

namespace rworker {

struct LayerLayout {
    std::int64_t region_offset_bytes;  // of this layer in the arena
    std::int64_t block_bytes, head_bytes, values_offset_bytes;
    std::int64_t key_tile_bytes, value_tile_bytes;

    LayerLayout(const LayerSpec& layer, DType cache_dtype, std::int64_t block_size, std::int64_t region_offset);
};

/// Bytes that attention reads of one token in one KV head: keys, values and their scales, padding left out.
std::int64_t token_bytes(const LayerSpec& layer, DType cache_dtype);

/// Where one token's elements lie in a tile: runs of `run` neighbours, with a stride from run to run. An int4 run is
/// one code, at `shift`, or a lane of eight codes: two per byte, four dims apart.
struct RowPlace {
    std::int64_t first_byte, stride_bytes, run;
    int shift;
};

/// Order of the keys of a tile, which follow their scales.
enum class KeyOrder { lanes, rows };

/// Order of the keys in the tile that begins with token `first`, in a sequence of `length` tokens.
inline KeyOrder key_order(std::int64_t first, std::int64_t length) {
    return first + kTileTokens <= length ? KeyOrder::lanes : KeyOrder::rows;
}

/// Turns the keys of one tile from lanes to rows.
void turn_keys_to_rows(DType dtype, std::uint8_t* tile, std::int64_t key_dim);

RowPlace key_place(DType dtype, KeyOrder order, std::int64_t token, std::int64_t key_dim);
RowPlace value_place(DType dtype, std::int64_t token, std::int64_t value_dim);

/// One code of an int4 row: its byte, and its bits there.
struct CodePlace {
    std::int64_t byte;
    int shift;
};

inline CodePlace code_place(const RowPlace& row, std::int64_t dim) {
    if (row.run == 1) return {row.first_byte + dim * row.stride_bytes, row.shift};
    return {row.first_byte + dim / 8 * row.stride_bytes + dim % 4, int(dim / 4 % 2 * 4)};
}

/// Words of 4 bytes that hold the scales of one token's keys, or values, of `dim` elements.
std::int64_t scale_words(DType dtype, std::int64_t dim);

/// The same number, and the words of the fifth bits of an int4 key.
std::int64_t key_words(DType dtype, std::int64_t dim);

/// First byte of such a word in its tile.
inline std::int64_t scale_place(std::int64_t word, std::int64_t token) { return (word * kTileTokens + token) * 4; }

/// Returns one stored element of a key tile, dequantised.
float load_key(DType dtype, KeyOrder order, const std::uint8_t* tile, std::int64_t token, std::int64_t dim,
               std::int64_t key_dim);

/// Returns one stored element of a value tile, dequantised.
float load_value(DType dtype, const std::uint8_t* tile, std::int64_t token, std::int64_t dim, std::int64_t value_dim);

}  // namespace rworker
