// Queries and weights as pairs of bytes, which tile registers multiply with codes. factors.hpp has the numbers that are
// cut into bytes, and the meaning of the sums.
#pragma once

#include "kernels/tile_rows.hpp"

namespace {

constexpr int kCutQueryLimit = 16256;  // high -127..127, low -64..63; x 255 x 512 dims stays below 2^31
constexpr int kCutWeightLimit = 32767;  // high 0..127, low 0..255; x 255 x 256 tokens stays below 2^31

/// Numbers that turn a query's sums of products with keys into scores.
struct QueryTerms {
    float scale;            // of the factors
    float middle, total;    // int4: as in GroupTerms
    int32_t bias;           // int8: the sum of the factors times -128
};

/// Numbers that turn sums of products with a row's weights into outputs.
struct WeightTerms {
    float scale, constant;
    int32_t bias;

    /// output = output * keep + sum * scale + constant.
    [[gnu::always_inline]] void renew(float* output, __m512i sum, float keep) const {
        const __m512 kept = _mm512_fmadd_ps(_mm512_load_ps(output), _mm512_set1_ps(keep), _mm512_set1_ps(constant));
        const __m512 products = _mm512_cvtepi32_ps(_mm512_add_epi32(sum, _mm512_set1_epi32(bias)));
        _mm512_store_ps(output, _mm512_fmadd_ps(products, _mm512_set1_ps(scale), kept));
    }
};

/// Joins sums of products with the high bytes and with the low bytes.
template <int Shift>
[[gnu::always_inline]] inline __m512i join_bytes(const int32_t* high, const int32_t* low) {
    return _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(high), Shift), _mm512_load_si512(low));
}

/// Stores the lowest byte of each lane.
[[gnu::always_inline]] inline void store_bytes(uint8_t* to, __m512i lanes) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(lanes));
}

/// The factor by which numbers are multiplied so that `top` becomes `limit`.
inline float rounding_factor(float top, int limit) { return top >= kLeastFactor ? float(limit) / top : 0.0f; }

/// Cuts `rounds` times 64 dims of a query into bytes. The bytes of one round lie `stride` bytes after those of the
/// previous one.
inline QueryTerms cut_query(const float* query, int rounds, uint8_t* high_line, int64_t stride, uint8_t* low_line) {
    const Bounds bounds = bounds_of<Avx512>(query, rounds * 64);
    const float top = bounds.magnitude();
    const __m512 factor = _mm512_set1_ps(rounding_factor(top, kCutQueryLimit));
    __m512i sums = _mm512_setzero_si512();
    __m512 totals = _mm512_setzero_ps();
    for (int d = 0; d < rounds * 64; d += 16) {
        const __m512 x = _mm512_load_ps(query + d);
        const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(x, factor));
        const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(rounded, _mm512_set1_epi32(64)), 7);
        store_bytes(high_line + d / 64 * stride + d % 64, high);
        store_bytes(low_line + d / 64 * stride + d % 64, _mm512_sub_epi32(rounded, _mm512_slli_epi32(high, 7)));
        sums = _mm512_add_epi32(sums, rounded), totals = _mm512_add_ps(totals, x);
    }
    const float scale = (top >= kLeastFactor ? top / kCutQueryLimit : 0.0f) + bounds.poison;
    const int32_t sum = _mm512_reduce_add_epi32(sums);
    const float total = _mm512_reduce_add_ps(totals);
    return {scale, kKeyMiddle * (total - scale * float(sum)), total, less_offset(sum)};
}

[[gnu::always_inline]] inline void store_int8_scores(__m512i sum, const QueryTerms& factors, const uint8_t* header,
                                                     float* to) {
    const __m512 products = _mm512_cvtepi32_ps(_mm512_add_epi32(sum, _mm512_set1_epi32(factors.bias)));
    const __m512 key_scale = _mm512_loadu_ps(reinterpret_cast<const float*>(header));
    _mm512_store_ps(to, _mm512_mul_ps(_mm512_mul_ps(products, _mm512_set1_ps(factors.scale)), key_scale));
}

/// Adds the scores of one round; the scores of the earlier rounds are in `to`.
[[gnu::always_inline]] inline void add_int4_scores(__m512i sum, const QueryTerms& factors, const uint8_t* header,
                                                   int round, float* to) {
    const uint32_t* const pairs = reinterpret_cast<const uint32_t*>(header);
    const __m512 products =
        _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(factors.scale), _mm512_set1_ps(factors.middle));
    __m512 zeros = _mm512_mul_ps(Avx512::load_pair_high(pairs), _mm512_set1_ps(factors.total));
    if (round > 0) zeros = _mm512_add_ps(zeros, _mm512_load_ps(to));
    _mm512_store_ps(to, _mm512_fmadd_ps(Avx512::load_pair_low(pairs), products, zeros));
}

/// Multiplies a row's weights of the tokens in `worked_on` by their scales, which begin `header` bytes into a tile of
/// values, and cuts them into bytes. The rest of `covered` gets zeros. The bytes of each 64 tokens lie `stride` bytes
/// after the previous ones. Weights are not changed.
template <DType D>
[[gnu::noinline]] WeightTerms cut_row(const float* weights, const Tile* tiles, int header, Range worked_on,
                                      Range covered, uint8_t* high_line, int64_t stride, uint8_t* low_line) {
    alignas(64) float scaled[kMaxChunkTiles * kTileTokens];
    __m512 top = _mm512_setzero_ps(), total = top, zeros = top;
    for (int t = worked_on.begin; t < worked_on.end; t += 16) {
        const uint8_t* const scales = tiles[t / kTileTokens].values + header;
        const __m512 weight = _mm512_load_ps(weights + t);
        if constexpr (D == DType::int4) {
            const uint32_t* const pairs = reinterpret_cast<const uint32_t*>(scales);
            _mm512_store_ps(scaled + t, weigh<Avx512>(weight, Avx512::load_pair_low(pairs)));
            zeros = _mm512_add_ps(zeros, weigh<Avx512>(weight, Avx512::load_pair_high(pairs)));
        } else {
            _mm512_store_ps(scaled + t, weigh<Avx512>(weight, _mm512_loadu_ps(scales)));
        }
        top = _mm512_max_ps(top, _mm512_load_ps(scaled + t)), total = _mm512_add_ps(total, _mm512_load_ps(scaled + t));
    }
    const float max = _mm512_reduce_max_ps(top), sum_scaled = _mm512_reduce_add_ps(total);
    const __m512 factor = _mm512_set1_ps(rounding_factor(max, kCutWeightLimit));
    __m512i sums = _mm512_setzero_si512();
    for (int t = covered.begin; t < covered.end; t += 16) {
        __m512i rounded = _mm512_setzero_si512();
        if (t >= worked_on.begin && t < worked_on.end)
            rounded = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(scaled + t), factor));
        const int64_t place = (t - covered.begin) / 64 * stride + t % 64;
        store_bytes(high_line + place, _mm512_srli_epi32(rounded, 8));
        store_bytes(low_line + place, rounded);
        sums = _mm512_add_epi32(sums, rounded);
    }
    const int32_t sum = _mm512_reduce_add_epi32(sums);
    const float scale = (max >= kLeastFactor ? max / kCutWeightLimit : 0.0f) + sum_scaled * 0.0f;
    if constexpr (D == DType::int4)
        return {scale, Avx512::reduce_add(zeros) + kValueMiddle * (sum_scaled - scale * float(sum)), 0};
    return {scale, 0.0f, less_offset(sum)};
}

/// Splits lines of keys, each into two lines of bytes; their fifth bits lie before them.
[[gnu::noinline]] void split_keys(const uint8_t* codes, int lines, uint8_t* bytes) {
    const uint8_t* const bits = codes - (lines + kFifthBitLines - 1) / kFifthBitLines * kHeaderLineBytes;
    for (int line = 0; line < lines; ++line, codes += 64, bytes += 128) {
        const uint8_t* const fifth = bits + line / kFifthBitLines * kHeaderLineBytes;
        _mm512_store_si512(bytes, key_codes<Avx512, 0>(codes, fifth, line));
        _mm512_store_si512(bytes + 64, key_codes<Avx512, 1>(codes, fifth, line));
    }
}

/// Splits lines of 16 lanes, `per_line` in a row: low nibbles to one line of bytes, high nibbles to the next.
[[gnu::noinline]] void split_nibbles(const uint8_t* codes, int lines, int per_line, uint8_t* bytes) {
    for (int line = 0; line < lines; ++line)
        for (int i = 0; i < per_line; ++i, codes += 64) {
            uint8_t* const to = bytes + (2 * line * per_line + i) * 64;
            const __m512i pairs = _mm512_loadu_si512(codes);
            _mm512_store_si512(to, Avx512::low_nibbles(pairs));
            _mm512_store_si512(to + per_line * 64, Avx512::high_nibbles(pairs));
        }
}

}  // namespace
