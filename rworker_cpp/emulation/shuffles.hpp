// What the kernels of tile registers use besides: lanes that change places, bytes, powers of two.
#pragma once

#include "integers.hpp"
#include "vectors.hpp"

typedef double __m512d __attribute__((vector_size(64), may_alias));
typedef long long __m128i __attribute__((vector_size(16), may_alias));

RWORKER_INTRINSIC __m512 _mm512_setzero_ps() { return __m512{}; }
RWORKER_INTRINSIC __m512 _mm512_load_ps(const void* p) { return (__m512)_mm512_loadu_si512(p); }
RWORKER_INTRINSIC void _mm512_store_ps(void* p, __m512 a) { _mm512_storeu_si512(p, (__m512i)a); }
RWORKER_INTRINSIC __m512i _mm512_load_si512(const void* p) { return _mm512_loadu_si512(p); }
RWORKER_INTRINSIC void _mm512_store_si512(void* p, __m512i a) { _mm512_storeu_si512(p, a); }
RWORKER_INTRINSIC void _mm_storeu_si128(void* p, __m128i a) { __builtin_memcpy(p, &a, sizeof(a)); }

RWORKER_INTRINSIC __m512d _mm512_castps_pd(__m512 a) { return (__m512d)a; }
RWORKER_INTRINSIC __m512 _mm512_castpd_ps(__m512d a) { return (__m512)a; }

namespace emulation {

/// Interleaves, in each quarter, the low or the high half of `a` with the same half of `b`, lane by lane.
template <class Lane, class Vector>
RWORKER_INTRINSIC Vector unpacked(Vector a, Vector b, bool high) {
    constexpr int quarter = 16 / sizeof(Lane), half = quarter / 2;
    const Lanes<Lane> x(a), y(b);
    Lanes<Lane> mixed;
    for (int i = 0; i < 4 * half; ++i) {
        const int from = i / half * quarter + i % half + (high ? half : 0);
        mixed[2 * i] = x[from], mixed[2 * i + 1] = y[from];
    }
    return mixed;
}

/// a * 2^floor(b). Of a quiet NaN and an infinite power only the power counts.
RWORKER_INTRINSIC float scaled(float a, float b) {
    if (__builtin_isnan(a) && (bits_of(a) & 0x400000) != 0 && __builtin_isinf(b)) return b > 0.0f ? b : 0.0f;
    if (__builtin_isnan(a) || __builtin_isnan(b)) return a + b;
    if (b == __builtin_inff()) return a == 0.0f ? __builtin_nanf("") : a * b;
    if (b == -__builtin_inff()) return __builtin_isinf(a) ? __builtin_nanf("") : __builtin_copysignf(0.0f, a);
    const float bounded = b < -1000.0f ? -1000.0f : b > 1000.0f ? 1000.0f : b;
    return __builtin_ldexpf(a, int(__builtin_floorf(bounded)));
}

/// x - floor(x), rounded down as well: never 1, and -0 for 0.
RWORKER_INTRINSIC float above_floor(float x) {
    if (__builtin_isinf(x)) return 0.0f;
    const float below = __builtin_floorf(x), rest = x - below;
    if (rest == 0.0f) return -0.0f;
    return rest >= 1.0f || double(rest) > double(x) - double(below) ? float_of(bits_of(rest) - 1) : rest;
}

/// Rounded to nearest even; a subnormal number is a zero, and a NaN quiet.
RWORKER_INTRINSIC uint32_t nearest_bfloat(float x) {
    const uint32_t bits = bits_of(x), magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return bits >> 16 | 0x40;
    if (magnitude < 0x00800000u) return bits >> 16 & 0x8000;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

}  // namespace emulation

RWORKER_INTRINSIC __m512 _mm512_unpacklo_ps(__m512 a, __m512 b) { return emulation::unpacked<uint32_t>(a, b, false); }
RWORKER_INTRINSIC __m512 _mm512_unpackhi_ps(__m512 a, __m512 b) { return emulation::unpacked<uint32_t>(a, b, true); }
RWORKER_INTRINSIC __m512d _mm512_unpacklo_pd(__m512d a, __m512d b) {
    return emulation::unpacked<uint64_t>(a, b, false);
}
RWORKER_INTRINSIC __m512d _mm512_unpackhi_pd(__m512d a, __m512d b) { return emulation::unpacked<uint64_t>(a, b, true); }

/// Two quarters of `a` and two of `b`, as pairs of bits say.
RWORKER_INTRINSIC __m512 _mm512_shuffle_f32x4(__m512 a, __m512 b, int quarters) {
    const emulation::Lanes<float> x(a), y(b);
    emulation::Lanes<float> chosen;
    for (int i = 0; i < 16; ++i) {
        const int from = (quarters >> i / 4 * 2 & 3) * 4 + i % 4;
        chosen[i] = i < 8 ? x[from] : y[from];
    }
    return chosen;
}

/// Zeros where the mask has a zero.
RWORKER_INTRINSIC __m512 _mm512_maskz_mov_ps(__mmask16 mask, __m512 a) {
    emulation::Lanes<uint32_t> kept(a);
    for (int i = 0; i < 16; ++i) kept[i] = mask >> i & 1 ? kept[i] : 0;
    return kept;
}

RWORKER_INTRINSIC __m512 _mm512_maskz_scalef_ps(__mmask16 mask, __m512 a, __m512 b) {
    const emulation::Lanes<float> x(a), y(b);
    emulation::Lanes<float> result;
    for (int i = 0; i < 16; ++i) result[i] = mask >> i & 1 ? emulation::scaled(x[i], y[i]) : 0.0f;
    return result;
}

/// a - floor(a), which is all that the kernels ask for.
RWORKER_INTRINSIC __m512 _mm512_reduce_ps(__m512 a, int) {
    emulation::Lanes<float> x(a);
    for (int i = 0; i < 16; ++i) x[i] = emulation::above_floor(x[i]);
    return x;
}

/// The low lanes are those of `b`.
RWORKER_INTRINSIC __m512bh _mm512_cvtne2ps_pbh(__m512 a, __m512 b) {
    const emulation::Lanes<float> high(a), low(b);
    emulation::Lanes<uint16_t> halves;
    for (int i = 0; i < 16; ++i) {
        halves[i] = uint16_t(emulation::nearest_bfloat(low[i]));
        halves[16 + i] = uint16_t(emulation::nearest_bfloat(high[i]));
    }
    return halves;
}

RWORKER_INTRINSIC __m512i _mm512_sub_epi32(__m512i a, __m512i b) {
    return (__m512i)((emulation::u32x16)a - (emulation::u32x16)b);
}

RWORKER_INTRINSIC __m512i _mm512_srai_epi32(__m512i a, unsigned n) {
    emulation::Lanes<int32_t> x(a);
    for (int i = 0; i < 16; ++i) x[i] >>= n;
    return x;
}

RWORKER_INTRINSIC int _mm512_reduce_add_epi32(__m512i a) {
    const emulation::Lanes<uint32_t> x(a);
    uint32_t sum = 0;
    for (int i = 0; i < 16; ++i) sum += x[i];
    return int(sum);
}

/// Takes the lowest byte of each lane.
RWORKER_INTRINSIC __m128i _mm512_cvtepi32_epi8(__m512i a) {
    const emulation::Lanes<uint32_t> x(a);
    emulation::Lanes<uint8_t, 16> low;
    for (int i = 0; i < 16; ++i) low[i] = uint8_t(x[i]);
    return low;
}
