// Compiled twice: with the compiler's <immintrin.h> and with the emulation's. Nothing of the standard library, as in
// the kernels.
#include "intrinsics.hpp"

#include <immintrin.h>
#include <stdint.h>

namespace {

using Operands = unsigned char[3][64];

__m512 floats(const unsigned char* operand) { return _mm512_loadu_ps((const float*)operand); }
__m512i integers(const unsigned char* operand) { return _mm512_loadu_si512(operand); }
__m256i half(const unsigned char* operand) { return _mm256_loadu_si256((const __m256i*)operand); }

template <class Lane>
Lane first(const unsigned char* operand) {
    Lane lane;
    __builtin_memcpy(&lane, operand, sizeof(lane));
    return lane;
}

__mmask16 mask(const unsigned char* operand) { return first<__mmask16>(operand); }

void keep(unsigned char (&result)[64], __m512 a) { _mm512_storeu_ps((float*)result, a); }
void keep(unsigned char (&result)[64], __m512i a) { _mm512_storeu_si512(result, a); }
void keep(unsigned char (&result)[64], __m256i a) { _mm256_storeu_si256((__m256i*)result, a); }
void keep(unsigned char (&result)[64], __m128i a) { _mm_storeu_si128((__m128i*)result, a); }
void keep(unsigned char (&result)[64], __mmask16 a) { __builtin_memcpy(result, &a, sizeof(a)); }
void keep(unsigned char (&result)[64], float a) { __builtin_memcpy(result, &a, sizeof(a)); }
void keep(unsigned char (&result)[64], int a) { __builtin_memcpy(result, &a, sizeof(a)); }

__m512 from_floats(const unsigned char* operand) {
    float x[16];
    __builtin_memcpy(x, operand, sizeof(x));
    return _mm512_setr_ps(x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9], x[10], x[11], x[12], x[13], x[14],
                          x[15]);
}

}  // namespace

#define OF(name, any_nan, ...) \
    {name, any_nan, [](const Operands& in, unsigned char(&result)[64]) { keep(result, __VA_ARGS__); }}
#define BITS(name, ...) OF(#name, false, _mm512_##name(__VA_ARGS__))
#define SUMS(name, ...) OF(#name, true, _mm512_##name(__VA_ARGS__))
#define F(i) floats(in[i])
#define I(i) integers(in[i])

// clang-format off
const Intrinsic RWORKER_INTRINSICS[] = {
    BITS(set1_ps, first<float>(in[0])), OF("setr_ps", false, from_floats(in[0])),
    SUMS(add_ps, F(0), F(1)), SUMS(sub_ps, F(0), F(1)), SUMS(mul_ps, F(0), F(1)), SUMS(div_ps, F(0), F(1)),
    SUMS(fmadd_ps, F(0), F(1), F(2)), SUMS(dpbf16_ps, F(0), (__m512bh)I(1), (__m512bh)I(2)),
    SUMS(reduce_add_ps, F(0)), BITS(reduce_max_ps, F(0)), BITS(max_ps, F(0), F(1)), BITS(abs_ps, F(0)),
    BITS(and_ps, F(0), F(1)), BITS(or_ps, F(0), F(1)),
    BITS(cmp_ps_mask, F(0), F(1), _CMP_LT_OQ), BITS(cmp_ps_mask, F(0), F(1), _CMP_UNORD_Q),
    BITS(mask_blend_ps, mask(in[2]), F(0), F(1)), BITS(castps_si512, F(0)), BITS(castsi512_ps, I(0)),
    BITS(cvtss_f32, F(0)), BITS(cvtsi512_si32, I(0)), BITS(cvtepi32_ps, I(0)), BITS(cvtps_epi32, F(0)),
    BITS(cvtepu16_epi32, half(in[0])), BITS(cvtepi32_epi16, I(0)), BITS(cvtph_ps, half(in[0])),
    BITS(cvtps_ph, F(0), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), BITS(setzero_si512),
    BITS(set1_epi8, first<char>(in[0])), BITS(set1_epi16, first<short>(in[0])),
    BITS(set1_epi32, first<int>(in[0])), BITS(set1_epi64, first<long long>(in[0])),
    BITS(and_si512, I(0), I(1)), BITS(or_si512, I(0), I(1)), BITS(xor_si512, I(0), I(1)),
    BITS(mask_or_epi32, I(0), mask(in[2]), I(1), I(2)),
    BITS(add_epi16, I(0), I(1)), BITS(add_epi32, I(0), I(1)), BITS(slli_epi32, I(0), 23),
    BITS(srli_epi32, I(0), 16), BITS(slli_epi64, I(0), 32), BITS(srli_epi64, I(0), 48),
    BITS(srli_epi16, I(0), 4), BITS(madd_epi16, I(0), I(1)), BITS(maddubs_epi16, I(0), I(1)),
    BITS(setzero_ps), BITS(unpacklo_ps, F(0), F(1)), BITS(unpackhi_ps, F(0), F(1)),
    OF("unpacklo_pd", false, _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(F(0)), _mm512_castps_pd(F(1))))),
    OF("unpackhi_pd", false, _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(F(0)), _mm512_castps_pd(F(1))))),
    BITS(shuffle_f32x4, F(0), F(1), 0x88), BITS(shuffle_f32x4, F(0), F(1), 0xdd),
    BITS(maskz_mov_ps, mask(in[2]), F(0)), SUMS(maskz_scalef_ps, mask(in[2]), F(0), F(1)), SUMS(reduce_ps, F(0), 1),
    OF("cvtne2ps_pbh", false, (__m512i)_mm512_cvtne2ps_pbh(F(0), F(1))), BITS(cvtepi32_epi8, I(0)),
    BITS(sub_epi32, I(0), I(1)), BITS(srai_epi32, I(0), 7), BITS(reduce_add_epi32, I(0)),
    BITS(cmp_ps_mask, F(0), F(1), _CMP_NLT_UQ), BITS(cmp_ps_mask, F(0), F(1), _CMP_NEQ_UQ),
    BITS(dpwssd_epi32, I(0), I(1), I(2)), BITS(dpbusd_epi32, I(0), I(1), I(2)),
    BITS(rorv_epi32, I(0), I(1)), BITS(ternarylogic_epi32, I(0), I(1), I(2), 0xf8),
};
// clang-format on

#ifdef RWORKER_EMULATED
const int kNumIntrinsics = sizeof(RWORKER_INTRINSICS) / sizeof(RWORKER_INTRINSICS[0]);
#endif
