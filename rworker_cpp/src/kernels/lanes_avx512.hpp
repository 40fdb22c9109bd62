// Sixteen lanes: AVX-512 F, BW, DQ and VL.
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace {

struct Avx512 {
    using vec = __m512;
    static constexpr int width = 16;
    static constexpr bool pair_dot = false;  // no product of bfloat16 pairs
    static constexpr bool half_products = false;  // no products of halves with sums of float32 either
    static constexpr int float_rows = 6, code_rows = 8;
    static constexpr int float_sums = 24, code_sums = 16, code_chunk = 64;

    static vec set1(float x) { return _mm512_set1_ps(x); }
    static vec load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, vec a) { _mm512_storeu_ps(p, a); }
    static vec add(vec a, vec b) { return _mm512_add_ps(a, b); }
    static vec sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
    static vec mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
    static vec div(vec a, vec b) { return _mm512_div_ps(a, b); }
    static vec fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
    static vec max(vec a, vec b) { return _mm512_max_ps(a, b); }
    static vec abs(vec a) { return _mm512_abs_ps(a); }
    static vec copy_sign(vec magnitude, vec sign) { return _mm512_or_ps(magnitude, _mm512_and_ps(set1(-0.0f), sign)); }
    static vec if_less(vec a, vec b, vec yes, vec no) {
        return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
    }
    static float first(vec a) { return _mm512_cvtss_f32(a); }
    static float reduce_max(vec a) { return _mm512_reduce_max_ps(a); }
    static float reduce_add(vec a) { return _mm512_reduce_add_ps(a); }
    static vec iota() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

    static vec power_of_two(vec shifted) {
        const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
        return _mm512_castsi512_ps(_mm512_add_epi32(exponent, _mm512_set1_epi32(0x3f800000)));
    }

    static vec load_half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
    static vec load_bfloat(const uint16_t* p) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
    }
    static vec load_pair_low(const uint32_t* p) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16));
    }
    static vec load_pair_high(const uint32_t* p) {
        return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(int(0xffff0000))));
    }

    static void store_half(uint16_t* p, vec a) {
        _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
    /// Rounds to nearest even. The bits of each number are in the high half of its lane; a NaN stays NaN.
    static __m512i rounded_bfloats(vec a) {
        const __m512i x = _mm512_castps_si512(a);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(x, 16), _mm512_set1_epi32(1));
        const __m512i even = _mm512_add_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(0x7fff)), odd);
        const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
        return _mm512_mask_or_epi32(even, nan, x, _mm512_set1_epi32(0x400000));
    }
    static void store_bfloat(uint16_t* p, vec a) {
        _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_bfloats(a), 16)));
    }

    using ivec = __m512i;
    static ivec load_int(const void* p) { return _mm512_loadu_si512(p); }
    static ivec broadcast_int(const void* p) {
        int lane;
        __builtin_memcpy(&lane, p, sizeof(lane));
        return _mm512_set1_epi32(lane);
    }
    static ivec zero_int() { return _mm512_setzero_si512(); }
    static void store_int(int32_t* p, ivec a) { _mm512_storeu_si512(p, a); }
    static ivec to_int(vec a) { return _mm512_cvtps_epi32(a); }
    static vec to_float(ivec a) { return _mm512_cvtepi32_ps(a); }
    static ivec even_bytes(ivec a) { return _mm512_and_si512(a, _mm512_set1_epi16(0xff)); }
    static ivec odd_bytes(ivec a) { return _mm512_srli_epi16(a, 8); }
    static ivec low_nibbles(ivec a) { return _mm512_and_si512(a, _mm512_set1_epi8(0x0f)); }
    static ivec high_nibbles(ivec a) { return low_nibbles(_mm512_srli_epi16(a, 4)); }
    static ivec join_fifth_bits(ivec nibbles, ivec bits, int place) {
        constexpr int or_and = 0xf8;  // a | (b & c)
        const __m512i fifth = _mm512_rorv_epi32(bits, _mm512_set1_epi32(place - 4));  // no bit leaves its byte
        return _mm512_ternarylogic_epi32(nibbles, fifth, _mm512_set1_epi8(0x10), or_and);
    }
    static ivec add_pair_products(ivec sum, ivec a, ivec b) { return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b)); }
    static ivec add_quad_products(ivec sum, ivec codes, ivec factors) {
        return _mm512_add_epi16(sum, _mm512_maddubs_epi16(codes, factors));
    }
    static ivec join_halves(ivec high, ivec low) {
        return _mm512_add_epi32(_mm512_madd_epi16(high, _mm512_set1_epi16(64)),
                                _mm512_madd_epi16(low, _mm512_set1_epi16(1)));
    }
};

}  // namespace
