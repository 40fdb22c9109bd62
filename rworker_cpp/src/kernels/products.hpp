// The two products of attention over the tiles of a chunk: queries with keys, and weights with values.
#pragma once

#include "kernels/ahead.hpp"

namespace {

/// Tokens of a chunk, or of a row in it: [begin, end), relative to the chunk's first.
struct Range {
    int begin, end;
};

inline int clamp(int64_t token, int most) { return int(token < 0 ? 0 : token > most ? most : token); }

/// The part of [begin, end) in the chunk of `tokens` that begins at `chunk`.
inline Range clip(int64_t begin, int64_t end, int64_t chunk, int tokens) {
    const Range range{clamp(begin - chunk, tokens), clamp(end - chunk, tokens)};
    return range.begin < range.end ? range : Range{0, 0};
}

/// `seen`, extended so that its begin and end are multiples of `count`.
inline Range round_out(Range seen, int count) {
    return {seen.begin / count * count, (seen.end + count - 1) / count * count};
}

/// Tokens of the tiles that `seen` touches.
inline Range whole_tiles(Range seen) { return round_out(seen, kTileTokens); }

/// True where add_line prefetches as many lines as `Bytes` bytes take, spread evenly between its vectors. False where a
/// vector is part of a line: the addresses would take registers, or as many instructions as the products.
template <class L, int Rows, int Bytes>
constexpr bool kAsksBetween = L::width == 16 && Rows > 2 && Bytes % kCacheLineBytes == 0;

template <class L, int Rows, int Bytes>
[[gnu::always_inline]] inline void ask(Ahead& ahead) {
    if constexpr (kAsksBetween<L, Rows, Bytes>)
        ahead.begin_asking<Bytes>();
    else
        ahead.ask<Bytes>();
}

template <class L, int Rows, int Vectors, int Bytes>
[[gnu::always_inline]] inline void ask_after(int vector, const Ahead& ahead) {
    if constexpr (kAsksBetween<L, Rows, Bytes>) {
        constexpr int lines = Bytes / kCacheLineBytes;
        const int line = vector * lines / Vectors;
        if ((vector + 1) * lines / Vectors > line) ahead.ask_one(line);
    }
}

/// sum[row][v] += factors[row][part] * line[v][part]. It uses one line of the cache for all rows: keys (a line is a dim
/// of 16 tokens) or values (a token with some dims). The smaller of factors and lines stays in registers. Factors of
/// pairs lie in pairs.
template <class L, class S, int Rows, int Vectors, int From, int To, int Bytes, class Address>
[[gnu::always_inline]] inline void add_line(Address address, const float* factors, int stride,
                                            typename L::vec (&sum)[Rows][Vectors], const Ahead& ahead) {
    if constexpr (S::pair_dot) {
        RWORKER_UNROLL
        for (int v = 0; v < Vectors; ++v) {
            const auto line = L::load_int(address(v));
            ask_after<L, Rows, Vectors, Bytes>(v, ahead);
            RWORKER_UNROLL
            for (int r = 0; r < Rows; ++r) {
                sum[r][v] = L::add_pair_dot(sum[r][v], line, L::broadcast_int(factors + r * stride));
            }
        }
    } else if constexpr (S::packs_factors) {
        RWORKER_UNROLL
        for (int v = 0; v < Vectors; v += 2) {
            typename L::ivec line;
            if constexpr (Vectors > 1)
                line = L::load_int(address(v));
            else
                line = L::load_four_halves(address(v));
            RWORKER_UNROLL
            for (int r = 0; r < Rows; ++r) {
                const auto factor = L::broadcast_int(factors + r * stride);
                sum[r][v] = L::add_low_halves(sum[r][v], line, factor);
                if constexpr (Vectors > 1) sum[r][v + 1] = L::add_high_halves(sum[r][v + 1], line, factor);
            }
        }
    } else if constexpr (Rows < Vectors) {
        RWORKER_UNROLL
        for (int v = 0; v < Vectors; ++v) {
            RWORKER_UNROLL
            for (int part = From; part < To; ++part) {
                const auto line = S::load(address(v), part);
                if (part == From) ask_after<L, Rows, Vectors, Bytes>(v, ahead);
                RWORKER_UNROLL
                for (int r = 0; r < Rows; ++r) {
                    sum[r][v] = L::fma(L::set1(factors[r * stride + part]), line, sum[r][v]);
                }
            }
        }
    } else {
        RWORKER_UNROLL
        for (int part = From; part < To; ++part) {
            typename L::vec line[Vectors];
            RWORKER_UNROLL
            for (int v = 0; v < Vectors; ++v) {
                line[v] = S::load(address(v), part);
                if (part == From) ask_after<L, Rows, Vectors, Bytes>(v, ahead);
            }
            RWORKER_UNROLL
            for (int r = 0; r < Rows; ++r) {
                const auto factor = L::set1(factors[r * stride + part]);
                RWORKER_UNROLL
                for (int v = 0; v < Vectors; ++v) {
                    sum[r][v] = L::fma(factor, line[v], sum[r][v]);
                }
            }
        }
    }
}

/// Computes scores[row][token] of `Rows` queries and `Vectors` vectors of tokens, from a tile's first on. It is a
/// separate function, because compilers spill sums when it is inlined.
template <class L, DType D, int Rows, int Vectors>
[[gnu::noinline]] void score_tiles(const Tile* tiles, Ahead& shared, const float* queries, int query_stride, int lines,
                                   float scale, float* scores) {
    using S = Stored<L, D>;
    constexpr int tile_vectors = kTileTokens / L::width, num_tiles = (Vectors + tile_vectors - 1) / tile_vectors;
    constexpr int line_bytes = kTileTokens * S::lane_bytes;
    typename L::vec sum[Rows][Vectors];
    RWORKER_UNROLL
    for (int r = 0; r < Rows; ++r) {
        RWORKER_UNROLL
        for (int v = 0; v < Vectors; ++v) {
            sum[r][v] = L::set1(0.0f);
        }
    }
    constexpr bool between = kAsksBetween<L, Rows, num_tiles * line_bytes>;
    Ahead copy = shared;  // a copy that stays in registers
    Ahead& ahead = between ? shared : copy;
    for (int line = 0; line < lines; ++line) {
        ask<L, Rows, num_tiles * line_bytes>(ahead);
        add_line<L, S, Rows, Vectors, 0, S::pack, num_tiles * line_bytes>(
            [&](int v) {
                return tiles[v / tile_vectors].keys + line * line_bytes + v % tile_vectors * L::width * S::lane_bytes;
            },
            queries + line * (S::pair_dot ? 1 : S::pack), query_stride, sum, ahead);
    }
    if constexpr (!between) shared = copy;
    RWORKER_UNROLL
    for (int r = 0; r < Rows; ++r) {
        RWORKER_UNROLL
        for (int v = 0; v < Vectors; ++v) {
            if constexpr (S::packs_factors) sum[r][v] = L::mul(sum[r][v], L::set1(scale));
            L::store(scores + r * kChunkTokens + v * L::width, sum[r][v]);
        }
    }
}

/// Computes scores of `Rows` queries with the tiles of a chunk that `seen` touches. Queries are scaled before, except
/// packed ones, so that queries of a 16-bit model lose no bits.
template <class L, DType D, int Rows>
void score_rows(const Tile* tiles, Range seen, Ahead& ahead, const float* queries, int query_stride, int lines,
                float scale, float* scores) {
    constexpr int tile_vectors = kTileTokens / L::width, fit = L::float_sums / (Rows * tile_vectors);
    constexpr int together = fit >= 4 ? 4 : fit >= 2 ? 2 : 1;
    int tile = seen.begin / kTileTokens;
    // of the last tile, perhaps only the first vector is seen
    const int end = (seen.end + kTileTokens - 1 - (tile_vectors > 1 ? L::width : 0)) / kTileTokens;
    for (; tile + together <= end; tile += together)
        score_tiles<L, D, Rows, together * tile_vectors>(tiles + tile, ahead, queries, query_stride, lines, scale,
                                                         scores + tile * kTileTokens);
    for (; tile < end; ++tile)
        score_tiles<L, D, Rows, tile_vectors>(tiles + tile, ahead, queries, query_stride, lines, scale,
                                              scores + tile * kTileTokens);
    if (tile * kTileTokens < seen.end)
        score_tiles<L, D, Rows, 1>(tiles + tile, ahead, queries, query_stride, lines, scale,
                                   scores + tile * kTileTokens);
}

/// outputs[row][lane..] = output * keep + weights x values, over the tokens in `seen` only. Memory outside may hold an
/// old NaN, and a weight of 0 times NaN is NaN.
template <class L, DType D, int Rows, int Vectors>
[[gnu::noinline]] void add_values(const Tile* tiles, Range seen, Ahead& shared, const float* weights,
                                  const float* keep, int lane, float* const* outputs, int padded_dim) {
    using S = Stored<L, D>;
    constexpr int pack = S::pack;
    constexpr int vector_bytes = L::width * S::lane_bytes, step_bytes = Vectors * vector_bytes;
    const int line_bytes = padded_dim * S::lane_bytes;
    typename L::vec sum[Rows][Vectors];
    RWORKER_UNROLL
    for (int r = 0; r < Rows; ++r) {
        RWORKER_UNROLL
        for (int v = 0; v < Vectors; ++v) {
            sum[r][v] = L::mul(L::load(outputs[r] + lane + v * L::width), L::set1(keep[r]));
        }
    }
    constexpr bool between = kAsksBetween<L, Rows, step_bytes>;
    Ahead copy = shared;  // a copy that stays in registers
    Ahead& ahead = between ? shared : copy;
    // A dot product takes whole pairs. An unseen token of a pair has weight 0 and no old value.
    constexpr int least = S::pair_dot ? 1 : pack;  // tokens for which a whole line is read
    for (int t = S::pair_dot ? seen.begin / pack * pack : seen.begin; t < seen.end;) {
        const int tile_end = (t / kTileTokens + 1) * kTileTokens, end = tile_end < seen.end ? tile_end : seen.end;
        const Tile& tile = tiles[t / kTileTokens];
        const int first_line = t % kTileTokens / pack;
        const uint8_t* line = tile.values + first_line * line_bytes + lane * S::lane_bytes;
        const auto address = [&](int v) { return line + v * vector_bytes; };
        if (!S::pair_dot && pack == 2 && t % 2 == 1) {
            add_line<L, S, Rows, Vectors, pack - 1, pack, 0>(address, weights + t - 1, kChunkTokens, sum, ahead);
            line += line_bytes, ++t;
        }
        for (; t + least <= end; t += pack, line += line_bytes) {
            ask<L, Rows, step_bytes>(ahead);
            add_line<L, S, Rows, Vectors, 0, pack, step_bytes>(address, weights + (S::pair_dot ? int(unsigned(t) / pack) : t),
                                                               kChunkTokens, sum, ahead);
        }
        if (!S::pair_dot && pack == 2 && t < end)
            add_line<L, S, Rows, Vectors, 0, 1, 0>(address, weights + t, kChunkTokens, sum, ahead), ++t;
    }
    if constexpr (!between) shared = copy;
    RWORKER_UNROLL
    for (int r = 0; r < Rows; ++r) {
        RWORKER_UNROLL
        for (int v = 0; v < Vectors; ++v) {
            L::store(outputs[r] + lane + v * L::width, sum[r][v]);
        }
    }
}

template <class L, DType D, int Rows>
void add_value_rows(const Tile* tiles, Range seen, Ahead& ahead, const float* weights, const float* keep,
                    float* const* outputs, int padded_dim) {
    constexpr int least = kTileTokens / L::width;  // vectors in 16 dims
    constexpr int fit = L::float_sums / Rows;
    constexpr int together = least > 8 || fit < 2 * least ? least : fit >= 8 ? 8 : fit >= 4 ? 4 : 2;
    int lane = 0;
    for (; lane + together * L::width <= padded_dim; lane += together * L::width)
        add_values<L, D, Rows, together>(tiles, seen, ahead, weights, keep, lane, outputs, padded_dim);
    for (; lane < padded_dim; lane += kTileTokens)
        add_values<L, D, Rows, least>(tiles, seen, ahead, weights, keep, lane, outputs, padded_dim);
}

}  // namespace
