// Weighted sums of the codes of values.
#pragma once

#include "kernels/products_int.hpp"

namespace {

/// Calls f(tile, line in the tile, address of its `lane`) for all lines of the tiles, and prefetches the next chunk.
template <int Pack, int StepBytes, class F>
[[gnu::always_inline]] inline void for_value_lines(const Tile* tiles, Range tokens, int header, int lane,
                                                   int padded_dim, Ahead& shared, F f) {
    constexpr int tile_lines = kTileTokens / Pack;
    Ahead ahead = shared;  // a copy that stays in registers
    for (int tile = tokens.begin / kTileTokens; tile < tokens.end / kTileTokens; ++tile) {
        const uint8_t* line = tiles[tile].values + header + lane * 4;
        for (int i = 0; i < tile_lines; ++i, line += padded_dim * 4) {
            ahead.ask<StepBytes>();
            f(tile * kTileTokens + i * Pack, line);
        }
    }
    shared = ahead;
}

/// output = output * keep + sum * scale + constant.
template <class L>
[[gnu::always_inline]] inline void renew(float* output, typename L::ivec sum, float scale, float constant, float keep) {
    const auto kept = L::fma(L::load(output), L::set1(keep), L::set1(constant));
    L::store(output, L::fma(L::to_float(sum), L::set1(scale), kept));
}

template <class L, int Rows, int Vectors>
[[gnu::noinline]] void add_int8_values(const Tile* tiles, Range tokens, const PairWeights* weights,
                                       const float* keep, int lane, float* const* outputs, int padded_dim,
                                       Ahead& ahead) {
    Sums<L, DType::int8, Rows, Vectors> sums;
    RWORKER_UNROLL
    for (int r = 0; r < Rows; ++r) {
        RWORKER_UNROLL
        for (int v = 0; v < Vectors; ++v) {
            sums.sum[r][v] = L::broadcast_int(&weights[r].bias);
        }
    }
    for_value_lines<4, Vectors * L::width * 4>(
        tiles, tokens, kHeaderLineBytes, lane, padded_dim, ahead, [&](int token, const uint8_t* line) {
            sums.add([&](int v) { return line + v * L::width * 4; },
                     [&](int r) { return reinterpret_cast<const uint8_t*>(weights[r].pairs + token); });
        });
    RWORKER_UNROLL
    for (int r = 0; r < Rows; ++r) {
        RWORKER_UNROLL
        for (int v = 0; v < Vectors; ++v) {
            renew<L>(outputs[r] + lane + v * L::width, sums.sum[r][v], weights[r].scale, 0.0f, keep[r]);
        }
    }
}

template <class L, int Rows, int Vectors>
[[gnu::noinline]] void add_int4_values(const Tile* tiles, Range tokens, const HalfWeights* weights,
                                       const float* keep, int lane, float* const* outputs, int padded_dim,
                                       Ahead& ahead) {
    Sums<L, DType::int4, Rows, Vectors> sums;
    sums.clear();
    for_value_lines<8, Vectors * L::width * 4>(tiles, tokens, groups_of(padded_dim) * kHeaderLineBytes, lane,
                                               padded_dim, ahead, [&](int token, const uint8_t* line) {
                                                   sums.add([&]<int Half>(int v) __attribute__((always_inline)) {
                                                       return nibbles<L, Half>(L::load_int(line + v * L::width * 4));
                                                   },
                                                            [&](int r) { return weights[r].high + token; },
                                                            [&](int r) { return weights[r].low + token; });
                                               });
    RWORKER_UNROLL
    for (int r = 0; r < Rows; ++r) {
        RWORKER_UNROLL
        for (int v = 0; v < Vectors; ++v) {
            renew<L>(outputs[r] + lane + v * L::width, L::join_halves(sums.high[r][v], sums.low[r][v]),
                     weights[r].scale, weights[r].constant, keep[r]);
        }
    }
}

/// Calls f with the largest number of vectors that fit, as a compile-time constant, then with 1, until `end`.
template <class L, DType D, int Rows, class F>
inline void for_lanes(int lane, int end, F f) {
    constexpr int together = vectors_together<L, D, Rows>(4);
    for (; lane + together * L::width <= end; lane += together * L::width) f.template operator()<together>(lane);
    for (; lane < end; lane += L::width) f.template operator()<1>(lane);
}

/// output = output * keep + weights x values over the tokens in `seen`.
template <class L, DType D, int Rows>
    requires(is_quantized(D))
void add_value_rows(const Tile* tiles, Range seen, Ahead& ahead, const float* weights, const float* keep,
                    float* const* outputs, int padded_dim) {
    const Range tokens = whole_tiles(seen);
    if constexpr (D == DType::int8) {
        PairWeights shrunk[Rows];
        for (int r = 0; r < Rows; ++r) shrink_weights<L>(tiles, tokens, weights + r * chunk_tokens<L, D>, shrunk[r]);
        for_lanes<L, D, Rows>(0, padded_dim, [&]<int Vectors>(int lane) {
            add_int8_values<L, Rows, Vectors>(tiles, tokens, shrunk, keep, lane, outputs, padded_dim, ahead);
        });
    } else {
        for (int first = 0; first < padded_dim; first += kGroupDims) {
            const int end = first + kGroupDims < padded_dim ? first + kGroupDims : padded_dim;
            HalfWeights shrunk[Rows];
            for (int r = 0; r < Rows; ++r)
                shrink_weights<L>(tiles, tokens, first / kGroupDims, weights + r * chunk_tokens<L, D>, shrunk[r]);
            for_lanes<L, D, Rows>(first, end, [&]<int Vectors>(int lane) {
                add_int4_values<L, Rows, Vectors>(tiles, tokens, shrunk, keep, lane, outputs, padded_dim, ahead);
            });
        }
    }
}

}  // namespace
