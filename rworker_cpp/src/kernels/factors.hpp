// Queries and weights as small integers: the factors of integer products with codes.
//
// int8 codes are multiplied by int16 factors. int4 codes are multiplied by factors of 12 bits, cut into two int8
// halves, high * 64 + low. Products of the halves can be summed over 64 codes in 16 bits.
#pragma once

#include "kernels/codes.hpp"
#include "kernels/products.hpp"

namespace {

constexpr float kLeastFactor = 1e-30f;  // a row or chunk below this counts as zeros, since its reciprocal may overflow
constexpr int kInt8QueryLimit = 16383;  // x 255 x 512 dims stays below 2^31
constexpr int kInt8WeightLimit = 32767;
constexpr int kInt4QueryLimit = 2015;  // high -31..31, low -32..31: keys have 5 bits
constexpr int kInt4WeightLimit = 4095;
constexpr float kKeyMiddle = 15.5f, kValueMiddle = 7.5f;  // of int4 codes
constexpr int kHalf = 64;

/// Sets ints = floats * limit / top, rounded; returns their exact sum.
template <class L>
inline int32_t round_all(const float* floats, int count, float top, int limit, int32_t* ints) {
    const auto factor = L::set1(top >= kLeastFactor ? float(limit) / top : 0.0f);
    uint32_t sum = 0;  // for NaN the integers are arbitrary
    for (int i = 0; i < count; i += L::width) L::store_int(ints + i, L::to_int(L::mul(L::load(floats + i), factor)));
    for (int i = 0; i < count; ++i) sum += uint32_t(ints[i]);
    return int32_t(sum);
}

/// Start of a sum of products with int8 codes, which are stored 128 higher.
inline int32_t less_offset(int32_t sum) { return int32_t(0u - 128u * uint32_t(sum)); }

/// Orders the factors as a lane's four bytes are multiplied: even bytes, then odd bytes.
inline void pair_up(const int32_t* ints, int count, int16_t* pairs) {
    for (int i = 0; i < count; i += 4) {
        pairs[i] = int16_t(ints[i]), pairs[i + 1] = int16_t(ints[i + 2]);
        pairs[i + 2] = int16_t(ints[i + 1]), pairs[i + 3] = int16_t(ints[i + 3]);
    }
}

/// Numbers that turn a sum of products with int4 codes into the true sum. value = code * scale + zero. Codes count from
/// their middle, so that rounding errors of a factor average to 0: products * scale + middle, times the code's scale.
struct GroupTerms {
    float scale;   // of the factors
    float middle;  // 15.5 x (sum of the true factors - sum of the rounded ones)
    float total;   // of the true factors
};

// A query row is quantised in its own memory of `padded` floats: factors take the first half, their scale or terms
// follow.

/// int8: pairs of int16, their scale, and the start of the sums of their products.
template <class L>
inline void quantize_query_int8(float* row, int padded) {
    alignas(64) int32_t ints[rworker::kMaxHeadDim];
    alignas(64) int16_t pairs[rworker::kMaxHeadDim];
    const Bounds bounds = bounds_of<L>(row, padded);
    const float top = bounds.magnitude();
    const int32_t bias = less_offset(round_all<L>(row, padded, top, kInt8QueryLimit, ints));
    pair_up(ints, padded, pairs);
    __builtin_memcpy(row, pairs, size_t(padded) * sizeof(int16_t));
    row[padded / 2] = (top >= kLeastFactor ? top / kInt8QueryLimit : 0.0f) + bounds.poison;
    __builtin_memcpy(row + padded / 2 + 1, &bias, sizeof(bias));
}

/// int4: the high halves of all factors, the low halves, then the terms of each group.
template <class L>
inline void quantize_query_int4(float* row, int padded) {
    alignas(64) int32_t ints[rworker::kMaxHeadDim];
    alignas(64) int8_t halves[2 * rworker::kMaxHeadDim];
    GroupTerms terms[groups_of(rworker::kMaxHeadDim)];
    const int groups = groups_of(padded);
    for (int g = 0; g < groups; ++g) {
        const int first = g * kGroupDims, left = padded - first, count = left < kGroupDims ? left : kGroupDims;
        const Bounds bounds = bounds_of<L>(row + first, count);
        const float top = bounds.magnitude();
        const int32_t sum = round_all<L>(row + first, count, top, kInt4QueryLimit, ints + first);
        float total = 0.0f;
        for (int i = first; i < first + count; ++i) total += row[i];
        const float scale = (top >= kLeastFactor ? top / kInt4QueryLimit : 0.0f) + bounds.poison;
        terms[g] = {scale, kKeyMiddle * (total - scale * float(sum)), total};
    }
    for (int i = 0; i < padded; ++i) {
        const int32_t high = (ints[i] + kHalf / 2) >> 6;
        halves[i] = int8_t(high), halves[padded + i] = int8_t(ints[i] - high * kHalf);
    }
    __builtin_memcpy(row, halves, size_t(padded) * 2);
    __builtin_memcpy(row + padded / 2, terms, size_t(groups) * sizeof(GroupTerms));
}

template <class L, DType D>
inline void quantize_query(float* row, int padded) {
    if constexpr (D == DType::int8) quantize_query_int8<L>(row, padded);
    if constexpr (D == DType::int4) quantize_query_int4<L>(row, padded);
}

/// Weights of a chunk, multiplied by the scales of its tokens. Tiles outside `seen` are neither set nor used.
struct PairWeights {
    alignas(64) int16_t pairs[kMaxChunkTokens];
    float scale;
    int32_t bias;
};

struct HalfWeights {
    alignas(64) uint8_t high[kMaxChunkTokens], low[kMaxChunkTokens];
    float scale, constant;
};

/// weight * term; 0 for a weight of 0, since the scale of an unseen token may be an old NaN.
template <class L>
inline typename L::vec weigh(typename L::vec weight, typename L::vec term) {
    return L::if_less(L::set1(0.0f), weight, L::mul(weight, term), weight);
}

template <class L>
inline void shrink_weights(const Tile* tiles, Range tokens, const float* weights, PairWeights& shrunk) {
    alignas(64) float scaled[kMaxChunkTokens];
    alignas(64) int32_t ints[kMaxChunkTokens];
    auto top = L::set1(0.0f), total = top;
    for (int t = tokens.begin; t < tokens.end; t += L::width) {
        const float* scales = reinterpret_cast<const float*>(tiles[t / kTileTokens].values) + t % kTileTokens;
        const auto x = weigh<L>(L::load(weights + t), L::load(scales));
        L::store(scaled + t, x);
        top = L::max(top, x), total = L::add(total, x);
    }
    const float max = L::reduce_max(top), poison = L::reduce_add(total) * 0.0f;
    const int count = tokens.end - tokens.begin;
    shrunk.bias = less_offset(round_all<L>(scaled + tokens.begin, count, max, kInt8WeightLimit, ints + tokens.begin));
    shrunk.scale = (max >= kLeastFactor ? max / kInt8WeightLimit : 0.0f) + poison;
    pair_up(ints + tokens.begin, count, shrunk.pairs + tokens.begin);
}

template <class L>
inline void shrink_weights(const Tile* tiles, Range tokens, int group, const float* weights, HalfWeights& shrunk) {
    alignas(64) float scaled[kMaxChunkTokens];
    alignas(64) int32_t ints[kMaxChunkTokens];
    auto top = L::set1(0.0f), total = top, zeros = top;
    for (int t = tokens.begin; t < tokens.end; t += L::width) {
        const uint32_t* line = reinterpret_cast<const uint32_t*>(tiles[t / kTileTokens].values) + group * kTileTokens;
        const auto weight = L::load(weights + t);
        const auto x = weigh<L>(weight, L::load_pair_low(line + t % kTileTokens));
        L::store(scaled + t, x);
        top = L::max(top, x), total = L::add(total, x);
        zeros = L::add(zeros, weigh<L>(weight, L::load_pair_high(line + t % kTileTokens)));
    }
    const float max = L::reduce_max(top), sum_scaled = L::reduce_add(total);
    const int count = tokens.end - tokens.begin;
    const int32_t sum = round_all<L>(scaled + tokens.begin, count, max, kInt4WeightLimit, ints + tokens.begin);
    shrunk.scale = (max >= kLeastFactor ? max / kInt4WeightLimit : 0.0f) + sum_scaled * 0.0f;
    shrunk.constant = L::reduce_add(zeros) + kValueMiddle * (sum_scaled - shrunk.scale * float(sum));
    for (int t = tokens.begin; t < tokens.end; ++t) {
        shrunk.high[t] = uint8_t(ints[t] >> 6);
        shrunk.low[t] = uint8_t(ints[t] & (kHalf - 1));
    }
}

}  // namespace
