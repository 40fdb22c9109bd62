// int8 codes times bytes, four at once: queries up to 127, weights up to 255, each of which loses half a unit at most.
// For large groups, whose products take longer than reading the codes; see factors.hpp for those of 16 bits.
#pragma once

#include "kernels/scores_int.hpp"
#include "kernels/softmax.hpp"
#include "kernels/values_int.hpp"

namespace {

constexpr int kByteQueryLimit = 127, kByteWeightLimit = 255;
constexpr float kMostPeak = 6.0f;

/// Whether bytes are enough for a query. Rounding errs by top / 127 / sqrt(12) in each channel, as rounding a key to be
/// stored does, and scores by peak / 440 of what they deviate by over keys in all directions; peak: the largest channel
/// over the root mean square of all. So scores lose 1.4 % of that at most.
template <class L>
inline bool fits_bytes(const float* row, int padded, float top) {
    auto squares = L::set1(0.0f);
    for (int i = 0; i < padded; i += L::width) squares = L::fma(L::load(row + i), L::load(row + i), squares);
    return top * top * float(padded) <= kMostPeak * kMostPeak * L::reduce_add(squares);
}

/// Where a row says which it is, behind what quantize_query_int8 leaves.
inline float& is_narrow(float* row, int padded) { return row[padded / 2 + 2]; }

/// In the row's place, as quantize_query_int8, which takes those that bytes are not enough for.
template <class L>
inline void quantize_query_bytes(float* row, int padded) {
    alignas(64) int32_t ints[rworker::kMaxHeadDim];
    const Bounds bounds = bounds_of<L>(row, padded);
    const float top = bounds.magnitude();
    const bool fits = fits_bytes<L>(row, padded, top);
    if (fits) {
        const int32_t bias = less_offset(round_all<L>(row, padded, top, kByteQueryLimit, ints));
        uint8_t* const bytes = reinterpret_cast<uint8_t*>(row);
        for (int i = 0; i < padded; i += L::width) L::store_bytes(bytes + i, L::load_int(ints + i));
        row[padded / 2] = (top >= kLeastFactor ? top / kByteQueryLimit : 0.0f) + bounds.poison;
        __builtin_memcpy(row + padded / 2 + 1, &bias, sizeof(bias));
    } else {
        quantize_query_int8<typename L::Wide>(row, padded);
    }
    is_narrow(row, padded) = fits ? 1.0f : 0.0f;
}

struct ByteWeights {
    alignas(64) uint8_t bytes[kChunkTokens];
    float scale;
};

/// What is rounded away is spread over the rest, for it may be many small weights.
template <class L>
[[gnu::always_inline]] inline void shrink_weights(const Tile* tiles, Range tokens, const float* weights,
                                                  ByteWeights& shrunk) {
    alignas(64) float scaled[kChunkTokens];
    auto top = L::set1(0.0f), total = top, sums = top;
    RWORKER_UNROLL
    for (int t = tokens.begin; t < tokens.end; t += L::width) {
        const float* scales = reinterpret_cast<const float*>(tiles[t / kTileTokens].values) + t % kTileTokens;
        const auto x = weigh<L>(L::load(weights + t), L::load(scales));
        L::store(scaled + t, x);
        top = L::max(top, x), total = L::add(total, x);
    }
    const float max = L::reduce_max(top), sum_scaled = L::reduce_add(total);
    const auto factor = L::set1(max >= kLeastFactor ? float(kByteWeightLimit) / max : 0.0f);
    RWORKER_UNROLL
    for (int t = tokens.begin; t < tokens.end; t += L::width) {
        const auto rounded = L::to_int(L::mul(L::load(scaled + t), factor));
        L::store_bytes(shrunk.bytes + t, rounded);
        sums = L::add(sums, L::to_float(rounded));
    }
    const float sum = L::reduce_add(sums);
    shrunk.scale = (max >= kLeastFactor ? sum_scaled / sum : 0.0f) + sum_scaled * 0.0f;
}

/// Sums of products of Rows x Vectors lanes, of which one factor has a sign: queries, or the codes of values.
template <class L, int Rows, int Vectors>
struct ByteSums {
    typename L::ivec sum[Rows][Vectors];

    template <class Start>
    [[gnu::always_inline]] explicit ByteSums(Start start) {
        RWORKER_UNROLL
        for (int r = 0; r < Rows; ++r) {
            RWORKER_UNROLL
            for (int v = 0; v < Vectors; ++v) {
                sum[r][v] = start(r);
            }
        }
    }

    /// A line of 4-byte lanes in codes(v), four bytes in factors(r), sum + their products in add_products(sum, codes,
    /// factors). Few rows keep their factors in registers, many rows the line.
    template <class Codes, class Factors, class Add>
    [[gnu::always_inline]] void add(Codes codes, Factors factors, Add add_products) {
        if constexpr (Rows < Vectors) {
            RWORKER_UNROLL
            for (int v = 0; v < Vectors; ++v) {
                const auto line = codes(v);
                RWORKER_UNROLL
                for (int r = 0; r < Rows; ++r) {
                    sum[r][v] = add_products(sum[r][v], line, L::broadcast_int(factors(r)));
                }
            }
        } else {
            typename L::ivec lines[Vectors];
            RWORKER_UNROLL
            for (int v = 0; v < Vectors; ++v) {
                lines[v] = codes(v);
            }
            RWORKER_UNROLL
            for (int r = 0; r < Rows; ++r) {
                const auto factor = L::broadcast_int(factors(r));
                RWORKER_UNROLL
                for (int v = 0; v < Vectors; ++v) {
                    sum[r][v] = add_products(sum[r][v], lines[v], factor);
                }
            }
        }
    }
};

template <class L, int Rows, int Vectors>
[[gnu::noinline]] void score_bytes(const Tile* tiles, int first, const float* queries, int stride, int lines,
                                   Ahead& shared, float* scores) {
    const KeyLines<L, Vectors> keys(tiles, first);
    Ahead ahead = shared;  // in registers
    ByteSums<L, Rows, Vectors> sums([&](int r) { return L::broadcast_int(queries + r * stride + stride / 2 + 1); });
    ahead.ask<keys.num_tiles * kHeaderLineBytes>();
    const uint8_t* factors = reinterpret_cast<const uint8_t*>(queries);
    for (int line = 1; line <= lines; ++line, factors += 4) {
        ahead.ask<keys.num_tiles * kHeaderLineBytes>();
        sums.add([&](int v) { return L::load_int(keys.vector(v) + line * kHeaderLineBytes); },
                 [&](int r) { return factors + r * stride * 4; }, L::add_byte_products);
    }
    shared = ahead;
    RWORKER_UNROLL
    for (int r = 0; r < Rows; ++r) {
        const auto scale = L::set1(queries[r * stride + stride / 2]);
        RWORKER_UNROLL
        for (int v = 0; v < Vectors; ++v) {
            const auto key_scale = L::load(reinterpret_cast<const float*>(keys.vector(v)));
            const auto score = L::mul(L::mul(L::to_float(sums.sum[r][v]), scale), key_scale);
            L::store(scores + r * kChunkTokens + (first + v) * L::width, score);
        }
    }
}

/// Scores of `Rows` queries with the tokens of a chunk in whose tiles there is one `seen`.
template <class L, int Rows>
void score_byte_rows(const Tile* tiles, Range seen, Ahead& ahead, const float* queries, int stride, int lines,
                     float* scores) {
    constexpr int together = vectors_together<L, DType::int8, Rows>(4);
    int vector = seen.begin / kTileTokens * (kTileTokens / L::width);
    const int end = (seen.end + L::width - 1) / L::width;
    for (; vector + together <= end; vector += together)
        score_bytes<L, Rows, together>(tiles, vector, queries, stride, lines, ahead, scores);
    for (; vector < end; ++vector) score_bytes<L, Rows, 1>(tiles, vector, queries, stride, lines, ahead, scores);
}

template <class L, int Rows, int Vectors>
[[gnu::noinline]] void add_byte_values(const Tile* tiles, Range tokens, const ByteWeights* weights, const float* keep,
                                       int lane, float* const* outputs, int padded_dim, Ahead& ahead) {
    ByteSums<L, Rows, Vectors> sums([](int) { return L::zero_int(); });
    for_value_lines<4, Vectors * L::width * 4>(
        tiles, tokens, kHeaderLineBytes, lane, padded_dim, ahead, [&](int token, const uint8_t* line) {
            sums.add([&](int v) { return L::signed_codes(L::load_int(line + v * L::width * 4)); },
                     [&](int r) { return weights[r].bytes + token; },
                     [](auto sum, auto codes, auto factors) { return L::add_byte_products(sum, factors, codes); });
        });
    RWORKER_UNROLL
    for (int r = 0; r < Rows; ++r) {
        RWORKER_UNROLL
        for (int v = 0; v < Vectors; ++v) {
            renew<L>(outputs[r] + lane + v * L::width, sums.sum[r][v], weights[r].scale, 0.0f, keep[r]);
        }
    }
}

/// output = output * keep + weights x values over the tokens in `seen`.
template <class L, int Rows>
void add_byte_value_rows(const Tile* tiles, Range seen, Ahead& ahead, const float* weights, const float* keep,
                         float* const* outputs, int padded_dim) {
    const Range tokens = whole_tiles(seen);
    ByteWeights shrunk[Rows];
    with_constant_range(tokens, [&](Range range) __attribute__((always_inline)) {
        for (int r = 0; r < Rows; ++r) shrink_weights<L>(tiles, range, weights + r * kChunkTokens, shrunk[r]);
    });
    for_lanes<L, DType::int8, Rows>(0, padded_dim, [&]<int Vectors>(int lane) {
        add_byte_values<L, Rows, Vectors>(tiles, tokens, shrunk, keep, lane, outputs, padded_dim, ahead);
    });
}

}  // namespace
