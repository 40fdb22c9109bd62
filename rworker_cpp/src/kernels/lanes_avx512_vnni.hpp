// AVX-512 whose integer products add to their sums by themselves.
#pragma once

#include "kernels/lanes_avx512.hpp"

namespace {

struct Avx512Vnni : Avx512 {
    static ivec add_pair_products(ivec sum, ivec a, ivec b) { return _mm512_dpwssd_epi32(sum, a, b); }
    /// Sums are 32 bits wide here, so halves are joined without widening.
    static ivec add_quad_products(ivec sum, ivec codes, ivec factors) {
        return _mm512_dpbusd_epi32(sum, codes, factors);
    }
    static ivec join_halves(ivec high, ivec low) { return _mm512_add_epi32(_mm512_slli_epi32(high, 6), low); }
};

}  // namespace
