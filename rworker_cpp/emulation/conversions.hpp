// From lanes of one kind to lanes of another.
#pragma once

#include "vectors.hpp"

#define _MM_FROUND_TO_NEAREST_INT 0x00
#define _MM_FROUND_NO_EXC 0x08

RWORKER_INTRINSIC __m512i _mm512_castps_si512(__m512 a) { return (__m512i)a; }
RWORKER_INTRINSIC __m512 _mm512_castsi512_ps(__m512i a) { return (__m512)a; }
RWORKER_INTRINSIC float _mm512_cvtss_f32(__m512 a) { return a[0]; }
RWORKER_INTRINSIC int _mm512_cvtsi512_si32(__m512i a) { return int(uint32_t(uint64_t(a[0]))); }

RWORKER_INTRINSIC __m512 _mm512_cvtepi32_ps(__m512i a) {
    const emulation::Lanes<int32_t> x(a);
    emulation::Lanes<float> converted;
    for (int i = 0; i < 16; ++i) converted[i] = float(x[i]);
    return converted;
}

/// To nearest even; INT32_MIN for what has no place in 32 bits.
RWORKER_INTRINSIC __m512i _mm512_cvtps_epi32(__m512 a) {
    const emulation::Lanes<float> x(a);
    emulation::Lanes<int32_t> rounded;
    for (int i = 0; i < 16; ++i) {
        const bool fits = x[i] >= -0x1p31f && x[i] < 0x1p31f;
        rounded[i] = fits ? int32_t(__builtin_rintf(x[i])) : INT32_MIN;
    }
    return rounded;
}

RWORKER_INTRINSIC __m512i _mm512_cvtepu16_epi32(__m256i a) {
    const emulation::Lanes<uint16_t, 32> x(a);
    emulation::Lanes<uint32_t> wide;
    for (int i = 0; i < 16; ++i) wide[i] = x[i];
    return wide;
}

/// Takes the low half of each lane.
RWORKER_INTRINSIC __m256i _mm512_cvtepi32_epi16(__m512i a) {
    const emulation::Lanes<uint32_t> x(a);
    emulation::Lanes<uint16_t, 32> low;
    for (int i = 0; i < 16; ++i) low[i] = uint16_t(x[i]);
    return low;
}

namespace emulation {

/// A NaN comes out quiet.
RWORKER_INTRINSIC float widened_half(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16, magnitude = half & 0x7fff;
    if (magnitude > 0x7c00) return float_of(sign | 0x7fc00000u | magnitude << 13);
    if (magnitude == 0x7c00) return float_of(sign | 0x7f800000u);
    return float_of(sign | bits_of(float_of(magnitude << 13) * 0x1p112f));  // exact: only the exponents' zeros differ
}

/// To nearest even, subnormal halves included.
RWORKER_INTRINSIC uint16_t nearest_half(float x) {
    const uint32_t sign = bits_of(x) >> 16 & 0x8000, magnitude = bits_of(x) & 0x7fffffff;
    if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
    if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00);  // 65520 and more round to infinity
    // Half an ulp of 0.5 is half of the smallest half: the sum's rounding is the one wanted.
    if (magnitude < 0x38800000u) return uint16_t(sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f)));
    return uint16_t(sign | (magnitude - 0x38000000u + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

}  // namespace emulation

RWORKER_INTRINSIC __m512 _mm512_cvtph_ps(__m256i a) {
    const emulation::Lanes<uint16_t, 32> x(a);
    emulation::Lanes<float> wide;
    for (int i = 0; i < 16; ++i) wide[i] = emulation::widened_half(x[i]);
    return wide;
}

/// Only rounding to nearest, as the kernels ask for.
RWORKER_INTRINSIC __m256i _mm512_cvtps_ph(__m512 a, int) {
    const emulation::Lanes<float> x(a);
    emulation::Lanes<uint16_t, 32> halves;
    for (int i = 0; i < 16; ++i) halves[i] = emulation::nearest_half(x[i]);
    return halves;
}
