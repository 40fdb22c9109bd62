// Lines of the cache, per dtype, and how they are loaded into lanes.
#pragma once

#include "kernels/rows.hpp"

namespace {

using rworker::HeadView;
using rworker::kTileTokens;

/// `pack` neighbours (dims of keys, tokens of values) share a lane of a line; a lane takes `lane_bytes`. `load` reads
/// neighbour `part` of L::width lanes. With `pair_dot` both are multiplied at once. Where `packs_factors`, the other
/// factors are rounded to the cache's own dtype: 32 bits hold a pair of them, or one.
template <class L, DType D>
struct Stored;

template <class L>
struct Stored<L, DType::float32> {
    static constexpr int pack = 1, lane_bytes = 4;
    static constexpr bool pair_dot = false, packs_factors = false;
    static typename L::vec load(const uint8_t* line, int) { return L::load(reinterpret_cast<const float*>(line)); }
};

template <class L>
struct Stored<L, DType::float16> {
    static constexpr int pack = 1, lane_bytes = 2;
    static constexpr bool pair_dot = false, packs_factors = L::half_products;
    static void pack_factors(float* floats, int count) { L::pack_halves(floats, count); }
    static typename L::vec load(const uint8_t* line, int) {
        return L::load_half(reinterpret_cast<const uint16_t*>(line));
    }
};

template <class L>
struct Stored<L, DType::bfloat16> {
    static constexpr int pack = 2, lane_bytes = 4;
    static constexpr bool pair_dot = L::pair_dot, packs_factors = L::pair_dot;
    static void pack_factors(float* floats, int count) { L::pack_pairs(floats, count); }
    static typename L::vec load(const uint8_t* line, int part) {
        const uint32_t* pairs = reinterpret_cast<const uint32_t*>(line);
        if (part == 0) return L::load_pair_low(pairs);  // a constant once loops over parts are unrolled
        return L::load_pair_high(pairs);
    }
};

/// The neighbours in one lane of a line.
template <int LaneBytes>
struct WordOf {
    using type = uint32_t;
};

template <>
struct WordOf<2> {
    using type = uint16_t;
};

template <int LaneBytes>
using StoredWord = typename WordOf<LaneBytes>::type;

/// Where a tile of 16 tokens of one sequence lies.
struct Tile {
    uint8_t *keys, *values;
};

inline Tile tile_of(const HeadView& view, int64_t tile) {
    const int64_t block = view.blocks[tile >> view.log2_tiles_per_block];
    const int64_t within = tile & ((int64_t(1) << view.log2_tiles_per_block) - 1);
    uint8_t* data = view.base + block * view.block_stride_bytes;
    if (view.split_values) {
        constexpr int64_t split_tiles = rworker::kSplitTokens / kTileTokens;
        return {data + within * view.key_tile_bytes, view.split_values + tile % split_tiles * view.value_tile_bytes};
    }
    return {data + within * view.key_tile_bytes, data + view.values_offset_bytes + within * view.value_tile_bytes};
}

}  // namespace
