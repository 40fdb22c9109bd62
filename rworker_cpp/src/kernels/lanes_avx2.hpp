// Eight lanes: AVX2 with FMA and F16C.
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace {

struct Avx2 {
    using vec = __m256;
    static constexpr int width = 8;
    static constexpr bool pair_dot = false;  // no product of bfloat16 pairs
    static constexpr bool half_products = false;  // no products of halves with sums of float32 either
    static constexpr int float_rows = 4, code_rows = 4;
    static constexpr int float_sums = 8, code_sums = 8, code_chunk = 64;

    static vec set1(float x) { return _mm256_set1_ps(x); }
    static vec load(const float* p) { return _mm256_loadu_ps(p); }
    static void store(float* p, vec a) { _mm256_storeu_ps(p, a); }
    static vec add(vec a, vec b) { return _mm256_add_ps(a, b); }
    static vec sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
    static vec mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
    static vec div(vec a, vec b) { return _mm256_div_ps(a, b); }
    static vec fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
    static vec max(vec a, vec b) { return _mm256_max_ps(a, b); }
    static vec abs(vec a) { return _mm256_andnot_ps(set1(-0.0f), a); }
    static vec copy_sign(vec magnitude, vec sign) { return _mm256_or_ps(magnitude, _mm256_and_ps(set1(-0.0f), sign)); }
    static vec if_less(vec a, vec b, vec yes, vec no) {
        return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
    }
    static float first(vec a) { return _mm256_cvtss_f32(a); }
    static float reduce_max(vec a) {
        __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        x = _mm_max_ps(x, _mm_movehl_ps(x, x));
        return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
    }
    static float reduce_add(vec a) {
        __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        x = _mm_add_ps(x, _mm_movehl_ps(x, x));
        return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
    }
    static vec iota() { return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7); }

    static vec power_of_two(vec shifted) {
        const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
        return _mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(0x3f800000)));
    }

    static vec load_half(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
    static vec load_bfloat(const uint16_t* p) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
    }
    static vec load_pair_low(const uint32_t* p) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i*)p), 16));
    }
    static vec load_pair_high(const uint32_t* p) {
        return _mm256_and_ps(_mm256_loadu_ps((const float*)p), _mm256_castsi256_ps(_mm256_set1_epi32(int(0xffff0000))));
    }

    static void store_half(uint16_t* p, vec a) {
        _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
    static void store_bfloat(uint16_t* p, vec a) {
        const __m256i x = _mm256_castps_si256(a), high = _mm256_srli_epi32(x, 16);
        const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
        const __m256i even = _mm256_add_epi32(_mm256_add_epi32(x, _mm256_set1_epi32(0x7fff)), odd);
        const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
        const __m256i bits =
            _mm256_blendv_epi8(_mm256_srli_epi32(even, 16), _mm256_or_si256(high, _mm256_set1_epi32(0x40)), nan);
        const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(bits, bits), 0x08);
        _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(packed));
    }

    using ivec = __m256i;
    static ivec load_int(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
    static ivec broadcast_int(const void* p) {
        int lane;
        __builtin_memcpy(&lane, p, sizeof(lane));
        return _mm256_set1_epi32(lane);
    }
    static ivec zero_int() { return _mm256_setzero_si256(); }
    static void store_int(int32_t* p, ivec a) { _mm256_storeu_si256((__m256i*)p, a); }
    static ivec to_int(vec a) { return _mm256_cvtps_epi32(a); }
    static vec to_float(ivec a) { return _mm256_cvtepi32_ps(a); }
    static ivec even_bytes(ivec a) { return _mm256_and_si256(a, _mm256_set1_epi16(0xff)); }
    static ivec odd_bytes(ivec a) { return _mm256_srli_epi16(a, 8); }
    static ivec low_nibbles(ivec a) { return _mm256_and_si256(a, _mm256_set1_epi8(0x0f)); }
    static ivec high_nibbles(ivec a) { return low_nibbles(_mm256_srli_epi16(a, 4)); }
    static ivec join_fifth_bits(ivec nibbles, ivec bits, int place) {
        const __m256i lowest = _mm256_and_si256(_mm256_srl_epi32(bits, _mm_cvtsi32_si128(place)), _mm256_set1_epi8(1));
        return _mm256_or_si256(nibbles, _mm256_slli_epi32(lowest, 4));
    }
    static ivec add_pair_products(ivec sum, ivec a, ivec b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
    static ivec add_quad_products(ivec sum, ivec codes, ivec factors) {
        return _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, factors));
    }
    static ivec join_halves(ivec high, ivec low) {
        return _mm256_add_epi32(_mm256_madd_epi16(high, _mm256_set1_epi16(64)),
                                _mm256_madd_epi16(low, _mm256_set1_epi16(1)));
    }
};

}  // namespace
