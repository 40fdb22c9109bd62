// Arithmetic of sixteen floats.
#pragma once

#include "vectors.hpp"

#define _CMP_LT_OQ 0x11
#define _CMP_UNORD_Q 0x03
#define _CMP_NEQ_UQ 0x04
#define _CMP_NLT_UQ 0x15

RWORKER_INTRINSIC __m512 _mm512_set1_ps(float x) {
    return (__m512)(emulation::u32x16{} + emulation::bits_of(x));  // as bits: 0 + -0 is 0
}

RWORKER_INTRINSIC __m512 _mm512_setr_ps(float e0, float e1, float e2, float e3, float e4, float e5, float e6, float e7,
                                        float e8, float e9, float e10, float e11, float e12, float e13, float e14,
                                        float e15) {
    return __m512{e0, e1, e2, e3, e4, e5, e6, e7, e8, e9, e10, e11, e12, e13, e14, e15};
}

RWORKER_INTRINSIC __m512 _mm512_loadu_ps(const void* p) {
    __m512 a;
    __builtin_memcpy(&a, p, sizeof(a));
    return a;
}

RWORKER_INTRINSIC void _mm512_storeu_ps(void* p, __m512 a) { __builtin_memcpy(p, &a, sizeof(a)); }

RWORKER_INTRINSIC __m512 _mm512_add_ps(__m512 a, __m512 b) { return a + b; }
RWORKER_INTRINSIC __m512 _mm512_sub_ps(__m512 a, __m512 b) { return a - b; }
RWORKER_INTRINSIC __m512 _mm512_mul_ps(__m512 a, __m512 b) { return a * b; }
RWORKER_INTRINSIC __m512 _mm512_div_ps(__m512 a, __m512 b) { return a / b; }

RWORKER_INTRINSIC __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) { return emulation::fused(a, b, c); }

namespace emulation {

/// As the instruction does, it returns the second operand if either is NaN or both are zeros.
RWORKER_INTRINSIC float max(float a, float b) { return a > b ? a : b; }

/// Zero for a subnormal number: dot products of pairs know none.
RWORKER_INTRINSIC float flushed(float x) {
    return (bits_of(x) & 0x7f800000u) == 0 ? float_of(bits_of(x) & 0x80000000u) : x;
}

/// x * y + z of bfloat16 x and y, rounded once; 0 if that, to 24 bits and whatever the exponent, is subnormal.
RWORKER_INTRINSIC float fused_flushed(float x, float y, float z) {
    constexpr double least = 0x1p-126 - 0x1p-151;  // rounds to the least float that is not subnormal
    const float sum = __builtin_fmaf(x, y, z);
    const double exact = double(x) * double(y) + double(z);  // near `least`
    return __builtin_fabs(exact) < least ? __builtin_copysignf(0.0f, sum) : sum;
}

/// A bfloat16 of a pair as a float.
RWORKER_INTRINSIC float widened(uint32_t pair, int part) {
    return flushed(float_of(part == 0 ? pair << 16 : pair & 0xffff0000u));
}

/// Combines the upper half with the lower half until one lane is left, in the order of GCC's header.
template <class Combine>
RWORKER_INTRINSIC float reduce(__m512 a, Combine combine) {
    Lanes<float> x(a);
    for (int half = 8; half > 2; half /= 2)
        for (int i = 0; i < half; ++i) x[i] = combine(x[half + i], x[i]);
    const float first = combine(x[0], x[2]), second = combine(x[1], x[3]);
    return combine(first, second);
}

}  // namespace emulation

RWORKER_INTRINSIC __m512 _mm512_max_ps(__m512 a, __m512 b) {
    return a > b ? a : b;
}

RWORKER_INTRINSIC float _mm512_reduce_max_ps(__m512 a) {
    return emulation::reduce(a, [](float x, float y) { return emulation::max(x, y); });
}

RWORKER_INTRINSIC float _mm512_reduce_add_ps(__m512 a) {
    return emulation::reduce(a, [](float x, float y) { return x + y; });
}

RWORKER_INTRINSIC __m512 _mm512_abs_ps(__m512 a) { return (__m512)((emulation::u32x16)a & 0x7fffffffu); }
RWORKER_INTRINSIC __m512 _mm512_and_ps(__m512 a, __m512 b) {
    return (__m512)((emulation::u32x16)a & (emulation::u32x16)b);
}
RWORKER_INTRINSIC __m512 _mm512_or_ps(__m512 a, __m512 b) {
    return (__m512)((emulation::u32x16)a | (emulation::u32x16)b);
}

RWORKER_INTRINSIC __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int predicate) {
    const emulation::Lanes<float> x(a), y(b);
    unsigned mask = 0;
    for (int i = 0; i < 16; ++i) {
        const bool holds = predicate == _CMP_LT_OQ    ? x[i] < y[i]
                           : predicate == _CMP_NLT_UQ ? !(x[i] < y[i])
                           : predicate == _CMP_NEQ_UQ ? x[i] != y[i]
                                                      : __builtin_isunordered(x[i], y[i]);
        mask |= unsigned(holds) << i;
    }
    return __mmask16(mask);
}

/// `b` where the mask has a one.
RWORKER_INTRINSIC __m512 _mm512_mask_blend_ps(__mmask16 mask, __m512 a, __m512 b) {
    const emulation::Lanes<float> x(a), y(b);
    emulation::Lanes<float> chosen;
    for (int i = 0; i < 16; ++i) chosen[i] = mask >> i & 1 ? y[i] : x[i];
    return chosen;
}

/// sum + products of pairs of bfloat16, the second ones first, each added with one rounding (as Intel's manual has it
/// and a Zen 5 does it; the flushing is measured on the latter).
RWORKER_INTRINSIC __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
    const emulation::Lanes<uint32_t> x((__m512i)a), y((__m512i)b);
    emulation::Lanes<float> total(sum);
    for (int i = 0; i < 16; ++i) {
        float lane = emulation::flushed(total[i]);
        for (int part = 1; part >= 0; --part)
            lane = emulation::fused_flushed(emulation::widened(x[i], part), emulation::widened(y[i], part), lane);
        total[i] = lane;
    }
    return total;
}
