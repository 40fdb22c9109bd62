// AVX-512 with dot products of bfloat16 pairs: both factors are rounded to bfloat16, sums are float32.
#pragma once

#include "kernels/lanes_avx512.hpp"

namespace {

struct Avx512Bf16 : Avx512 {
    static constexpr bool pair_dot = true;

    static vec add_pair_dot(vec sum, ivec a, ivec b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }

    /// Turns floats[0..count) into pairs of bfloat16, in the first half of their memory; count % 16 == 0.
    static void pack_pairs(float* floats, int count) {
        for (int i = 0; i < count; i += 2 * width) {
            const vec second = i + width < count ? load(floats + i + width) : set1(0.0f);
            _mm512_storeu_si512(floats + i / 2, (__m512i)_mm512_cvtne2ps_pbh(second, load(floats + i)));
        }
    }
};

}  // namespace
