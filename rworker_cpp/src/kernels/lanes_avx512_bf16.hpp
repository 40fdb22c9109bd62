// AVX-512 with dot products of bfloat16 pairs: both factors are rounded to bfloat16, sums are float32.
#pragma once

#include "kernels/lanes_avx512.hpp"

namespace {

struct Avx512Bf16 : Avx512 {
    static constexpr bool pair_dot = true;

    static vec add_pair_dot(vec sum, ivec a, ivec b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }

    /// floats[2i] = the bits of (floats[2i], floats[2i + 1]) rounded to bfloat16, the first in the low half.
    static void pack_pairs(float* floats) {
        const __m512i bits = rounded_bfloats(load(floats));
        const __m512i low = _mm512_srli_epi64(_mm512_slli_epi64(bits, 32), 48);  // of two lanes the first
        const __m512i high = _mm512_and_si512(_mm512_srli_epi64(bits, 32), _mm512_set1_epi64(0xffff0000));
        _mm512_storeu_si512(floats, _mm512_or_si512(low, high));
    }
};

}  // namespace
