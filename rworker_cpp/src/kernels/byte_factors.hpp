// Byte factors of codes: queries up to 127, weights up to 255. Each loses at most half a unit. factors.hpp has factors
// of more bits.
#pragma once

#include "kernels/scores_int.hpp"
#include "kernels/softmax.hpp"
#include "kernels/values_int.hpp"

namespace {

constexpr int kByteQueryLimit = 127, kByteWeightLimit = 255;
constexpr float kMostPeak = 6.0f;
constexpr float kInt4Offset = 8.0f;    // subtracted from an int4 code, so that it has a sign
constexpr float kToLowBits = 0x1p23f;  // adding it rounds a number to an integer, in the sum's low bits

/// True where bytes are exact enough for a query. Rounding errs by top / 127 / sqrt(12) in each channel, as rounding a
/// stored key does. So a score errs by peak / 440 of the scores' deviation over keys in all directions, where peak is
/// the largest channel divided by the root mean square of all. Scores lose at most 1.4 % of that.
template <class L>
inline bool fits_bytes(const float* row, int padded, float top) {
    auto squares = L::set1(0.0f);
    for (int i = 0; i < padded; i += L::width) squares = L::fma(L::load(row + i), L::load(row + i), squares);
    return top * top * float(padded) <= kMostPeak * kMostPeak * L::reduce_add(squares);
}

/// Where a row notes that it uses bytes, after all its factors.
inline float& is_narrow(float* row, int padded) { return row[padded - 1]; }

/// Replaces the row by bytes. From padded / 2 on follows their scale (1 for zeros, since scores may be -inf), then the
/// start values of products: for int8 codes the start of their sums, for int4 codes the sum of each group's bytes,
/// which zeros are multiplied by.
template <class L, DType D>
inline void round_query(float* row, int padded, float top) {
    const auto factor = L::set1(top >= kLeastFactor ? kByteQueryLimit / top : 0.0f), raise = L::set1(1.5f * kToLowBits);
    uint8_t* const bytes = reinterpret_cast<uint8_t*>(row);
    float sums[groups_of(rworker::kMaxQuantizedHeadDim)], sum = 0.0f;
    for (int first = 0; first < padded; first += kGroupDims) {
        const int end = first + kGroupDims < padded ? first + kGroupDims : padded;
        auto total = L::set1(0.0f);
        for (int i = first; i < end; i += L::width) {
            const auto raised = L::fma(L::load(row + i), factor, raise);
            L::store_bytes(bytes + i, L::as_int(raised));
            total = L::add(total, L::sub(raised, raise));
        }
        sums[first / kGroupDims] = L::reduce_add(total), sum += sums[first / kGroupDims];
    }
    float* const terms = row + padded / 2;
    terms[0] = top >= kLeastFactor ? top / kByteQueryLimit : 1.0f;
    if constexpr (D == DType::int8) terms[1] = float_of(uint32_t(less_offset(int32_t(sum))));
    if constexpr (D == DType::int4) __builtin_memcpy(terms + 1, sums, size_t(groups_of(padded)) * sizeof(float));
}

/// Like quantize_query of the wide lanes, for rows that need more than bytes.
template <class L, DType D>
inline void quantize_query_bytes(float* row, int padded) {
    const Bounds bounds = bounds_of<L>(row, padded);
    const bool fits = bounds.poison == 0.0f && fits_bytes<L>(row, padded, bounds.magnitude());
    if (fits)
        round_query<L, D>(row, padded, bounds.magnitude());
    else
        quantize_query<typename L::Wide, D>(row, padded);
    is_narrow(row, padded) = fits ? 1.0f : 0.0f;
}

/// Words that `pack_queries` makes of a row.
template <DType D>
constexpr int packed_words(int padded) {
    return padded / 4 + (D == DType::int8 ? 1 : int(groups_of(padded)));
}

/// Rows that are multiplied together, interleaved word by word: for each group of dims (of int8: all dims) the start
/// values of products, then the bytes.
template <DType D, int Rows>
inline void pack_queries(const float* queries, int padded, uint32_t* packed) {
    const int group_dims = D == DType::int8 ? padded : kGroupDims;
    const auto pack = [&](int word) {
        for (int r = 0; r < Rows; ++r) *packed++ = bits_of(queries[r * padded + word]);
    };
    for (int first = 0; first < padded; first += group_dims) {
        pack(padded / 2 + 1 + first / group_dims);
        const int end = first + group_dims < padded ? first + group_dims : padded;
        for (int word = first / 4; word < end / 4; ++word) pack(word);
    }
}

/// Weights of a chunk, times the scales of its tokens' values, as bytes. A value is (code * scale + middle) of its
/// token. Products with codes must be multiplied by `scale`; middles times weights sum to `constant`.
template <int Rows>
struct ByteWeights {
    alignas(64) uint8_t bytes[Rows][kMaxChunkTokens];
    alignas(64) float scale[16], constant[16];
};

/// Scales of 16 tokens, read from a header line.
template <class L, DType D>
[[gnu::always_inline]] inline typename L::vec load_scale(const uint8_t* line) {
    if constexpr (D == DType::int8) return L::load(reinterpret_cast<const float*>(line));
    if constexpr (D == DType::int4) return L::load_pair_low(reinterpret_cast<const uint32_t*>(line));
}

/// Scales of a chunk's values; of int4, those of a group of dims.
template <class L, DType D>
struct ValueTerms {
    alignas(64) float scales[kMaxChunkTokens], middles[kMaxChunkTokens];
    bool finite;

    [[gnu::always_inline]] ValueTerms(const Tile* tiles, Range tokens, int group) {
        auto poison = L::set1(0.0f);
        RWORKER_UNROLL
        for (int t = tokens.begin; t < tokens.end; t += L::width) {
            const uint8_t* const line = tiles[t / kTileTokens].values + group * kHeaderLineBytes + t % kTileTokens * 4;
            const uint32_t* const pairs = reinterpret_cast<const uint32_t*>(line);
            const auto scale = load_scale<L, D>(line);
            auto middle = L::set1(0.0f);
            if constexpr (D == DType::int4) middle = L::fma(scale, L::set1(kInt4Offset), L::load_pair_high(pairs));
            L::store(scales + t, scale), L::store(middles + t, middle);
            poison = L::fma(L::set1(0.0f), L::add(scale, middle), poison);
        }
        finite = L::reduce_add(poison) == 0.0f;
    }
};

/// Multiplies weights by their scales, and adds up weights times middles; `Masked`: weights from weigh.
template <class L, DType D, bool Masked>
[[gnu::always_inline]] inline void scale_weights(const ValueTerms<L, D>& terms, Range tokens, const float* weights,
                                                 float* scaled, float* max, float* total) {
    const auto times = [](auto weight, auto term) {
        if constexpr (Masked) return weigh<L>(weight, term);
        return L::mul(weight, term);
    };
    auto top = L::set1(0.0f), added = top;
    RWORKER_UNROLL
    for (int t = tokens.begin; t < tokens.end; t += L::width) {
        const auto weight = L::load(weights + t), x = times(weight, L::load(terms.scales + t));
        L::store(scaled + t, x);
        top = L::max(top, x);
        if constexpr (D == DType::int8) added = L::add(added, x);
        if constexpr (D == DType::int4) added = L::add(added, times(weight, L::load(terms.middles + t)));
    }
    *max = L::reduce_max(top), *total = L::reduce_add(added);
}

/// Steps that wait for a row's own result run for all rows at once, as in a softmax. The rounded-away part, which may
/// be many small weights, counts for int4's middles; of int8, whose middle is 0, it is spread over the other weights.
template <class L, DType D, int Rows>
[[gnu::always_inline]] inline void shrink_weights(const Tile* tiles, Range tokens, int group, const float* weights,
                                                  ByteWeights<Rows>& shrunk) {
    static_assert(Rows <= L::width);
    const ValueTerms<L, D> terms(tiles, tokens, group);
    alignas(64) float scaled[Rows][kMaxChunkTokens];
    alignas(64) float max[L::width] = {}, total[L::width] = {}, sum[L::width] = {}, factors[L::width];
    for (int r = 0; r < Rows; ++r) {
        const float* const row = weights + r * chunk_tokens<L, D>;
        if (terms.finite)
            scale_weights<L, D, false>(terms, tokens, row, scaled[r], max + r, total + r);
        else
            scale_weights<L, D, true>(terms, tokens, row, scaled[r], max + r, total + r);
    }
    const auto none = L::set1(0.0f), least = L::set1(kLeastFactor), limit = L::set1(float(kByteWeightLimit));
    L::store(factors, L::if_less(L::load(max), least, none, L::div(limit, L::load(max))));
    for (int r = 0; r < Rows; ++r) {
        auto sums = L::set1(0.0f);
        RWORKER_UNROLL
        for (int t = tokens.begin; t < tokens.end; t += L::width) {
            const auto raised = L::fma(L::load(scaled[r] + t), L::set1(factors[r]), L::set1(kToLowBits));
            L::store_bytes(shrunk.bytes[r] + t, L::as_int(raised));
            if constexpr (D == DType::int8) sums = L::add(sums, L::sub(raised, L::set1(kToLowBits)));
        }
        if constexpr (D == DType::int8) sum[r] = L::reduce_add(sums);
    }
    if constexpr (D == DType::int8) {
        const auto scale = L::if_less(L::load(max), least, none, L::div(L::load(total), L::load(sum)));
        L::store(shrunk.scale, L::add(scale, L::mul(L::load(total), none)));
        L::store(shrunk.constant, none);
    } else {
        L::store(shrunk.scale, L::mul(L::load(max), L::set1(1.0f / (kByteWeightLimit * L::signed_nibble_factor))));
        L::store(shrunk.constant, L::load(total));
    }
}

}  // namespace
