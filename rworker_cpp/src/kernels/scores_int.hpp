// Scores of quantised queries with the codes of keys.
#pragma once

#include "kernels/products_int.hpp"

namespace {

/// Where `Vectors` vectors of tokens lie, from the `first` of a chunk on: whole tiles, or all in one tile.
template <class L, int Vectors>
struct KeyLines {
    static constexpr int tile_vectors = kTileTokens / L::width;
    static constexpr int num_tiles = Vectors > tile_vectors ? Vectors / tile_vectors : 1;
    const uint8_t* start[num_tiles];

    KeyLines(const Tile* tiles, int first) {
        RWORKER_UNROLL
        for (int i = 0; i < num_tiles; ++i) {
            start[i] = tiles[first / tile_vectors + i].keys + first % tile_vectors * L::width * 4;
        }
    }

    [[gnu::always_inline]] const uint8_t* vector(int v) const {
        return start[v / tile_vectors] + v % tile_vectors * L::width * 4;
    }
};

// A separate function, for the reason of score_tiles.
template <class L, int Rows, int Vectors>
[[gnu::noinline]] void score_int8(const Tile* tiles, int first, const float* queries, int stride, int lines,
                                  Ahead& shared, float* scores) {
    const KeyLines<L, Vectors> keys(tiles, first);
    Ahead ahead = shared;  // a copy that stays in registers
    Sums<L, DType::int8, Rows, Vectors> sums;
    RWORKER_UNROLL
    for (int r = 0; r < Rows; ++r) {
        RWORKER_UNROLL
        for (int v = 0; v < Vectors; ++v) {
            sums.sum[r][v] = L::broadcast_int(queries + r * stride + stride / 2 + 1);
        }
    }
    ahead.ask<keys.num_tiles * kHeaderLineBytes>();
    const uint8_t* factors = reinterpret_cast<const uint8_t*>(queries);
    for (int line = 1; line <= lines; ++line, factors += 8) {
        ahead.ask<keys.num_tiles * kHeaderLineBytes>();
        sums.add([&](int v) { return keys.vector(v) + line * kHeaderLineBytes; },
                 [&](int r) { return factors + r * stride * 4; });
    }
    shared = ahead;
    RWORKER_UNROLL
    for (int r = 0; r < Rows; ++r) {
        const auto scale = L::set1(queries[r * stride + stride / 2]);
        RWORKER_UNROLL
        for (int v = 0; v < Vectors; ++v) {
            const auto key_scale = L::load(reinterpret_cast<const float*>(keys.vector(v)));
            const auto score = L::mul(L::mul(L::to_float(sums.sum[r][v]), scale), key_scale);
            L::store(scores + r * chunk_tokens<L, DType::int8> + (first + v) * L::width, score);
        }
    }
}

template <class L, int Rows, int Vectors>
[[gnu::noinline]] void score_int4(const Tile* tiles, int first, const float* queries, int stride, int lines,
                                  Ahead& shared, float* scores) {
    constexpr int group_lines = kGroupDims / 8;
    const KeyLines<L, Vectors> keys(tiles, first);
    Ahead ahead = shared;  // in registers
    const int groups = (lines + group_lines - 1) / group_lines;
    const int header_lines = groups + (lines + kFifthBitLines - 1) / kFifthBitLines;
    for (int g = 0; g < groups; ++g) {
        Sums<L, DType::int4, Rows, Vectors> sums;
        sums.clear();
        ahead.ask<keys.num_tiles * kHeaderLineBytes>();
        const int end = (g + 1) * group_lines < lines ? (g + 1) * group_lines : lines;
        const uint8_t* factors = reinterpret_cast<const uint8_t*>(queries) + g * kGroupDims;
        for (int line = g * group_lines; line < end; ++line, factors += 8) {
            ahead.ask<keys.num_tiles * kHeaderLineBytes>();
            if (line % kFifthBitLines == 0) ahead.ask<keys.num_tiles * kHeaderLineBytes>();
            const int bits = (groups + line / kFifthBitLines) * kHeaderLineBytes;
            sums.add([&]<int Half>(int v) __attribute__((always_inline)) {
                const uint8_t* const start = keys.vector(v);
                return key_codes<L, Half>(start + (header_lines + line) * kHeaderLineBytes, start + bits, line);
            },
                     [&](int r) { return factors + r * stride * 4; },
                     [&](int r) { return factors + r * stride * 4 + stride; });
        }
        RWORKER_UNROLL
        for (int r = 0; r < Rows; ++r) {
            const float* terms = queries + r * stride + stride / 2 + g * 3;
            RWORKER_UNROLL
            for (int v = 0; v < Vectors; ++v) {
                const uint32_t* header = reinterpret_cast<const uint32_t*>(keys.vector(v) + g * kHeaderLineBytes);
                float* score = scores + r * chunk_tokens<L, DType::int4> + (first + v) * L::width;
                const auto sum = L::to_float(L::join_halves(sums.high[r][v], sums.low[r][v]));
                const auto products = L::fma(sum, L::set1(terms[0]), L::set1(terms[1]));
                auto zeros = L::mul(L::load_pair_high(header), L::set1(terms[2]));
                if (g > 0) zeros = L::add(zeros, L::load(score));
                L::store(score, L::fma(L::load_pair_low(header), products, zeros));
            }
        }
    }
    shared = ahead;
}

template <class L, DType D, int Rows, int Vectors>
inline void score_vectors(const Tile* tiles, int first, const float* queries, int stride, int lines, Ahead& shared,
                          float* scores) {
    if constexpr (D == DType::int8) score_int8<L, Rows, Vectors>(tiles, first, queries, stride, lines, shared, scores);
    if constexpr (D == DType::int4) score_int4<L, Rows, Vectors>(tiles, first, queries, stride, lines, shared, scores);
}

/// Computes scores of `Rows` queries with the tokens of a chunk whose vectors have a token in `seen`.
template <class L, DType D, int Rows>
    requires(is_quantized(D))
void score_rows(const Tile* tiles, Range seen, Ahead& ahead, const float* queries, int query_stride, int lines,
                float /*scale*/, float* scores) {
    constexpr int together = vectors_together<L, D, Rows>(4);
    int vector = seen.begin / kTileTokens * (kTileTokens / L::width);
    const int end = (seen.end + L::width - 1) / L::width;
    for (; vector + together <= end; vector += together)
        score_vectors<L, D, Rows, together>(tiles, vector, queries, query_stride, lines, ahead, scores);
    for (; vector < end; ++vector)
        score_vectors<L, D, Rows, 1>(tiles, vector, queries, query_stride, lines, ahead, scores);
}

}  // namespace
