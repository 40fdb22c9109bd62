// AVX-512 with integer products that add to their sums in one instruction.
#pragma once

#include "kernels/lanes_avx512.hpp"

namespace {

struct Avx512Vnni : Avx512 {
    static constexpr int code_chunk = 128;  // sums are 32 bits wide
    static ivec add_pair_products(ivec sum, ivec a, ivec b) { return _mm512_dpwssd_epi32(sum, a, b); }
    /// Sums are 32 bits wide here, so halves are joined without widening.
    static ivec add_quad_products(ivec sum, ivec codes, ivec factors) {
        return _mm512_dpbusd_epi32(sum, codes, factors);
    }
    static ivec join_halves(ivec high, ivec low) { return _mm512_add_epi32(_mm512_slli_epi32(high, 6), low); }
};

/// int8 codes times bytes, four at once.
struct Avx512VnniBytes : Avx512Vnni {
    using Wide = Avx512Vnni;
    static constexpr bool joins_parts = false;
    static constexpr int code_sums = 24;

    static ivec as_int(vec a) { return _mm512_castps_si512(a); }
    static void store_bytes(uint8_t* p, ivec a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a)); }
    /// Codes are stored 128 higher.
    static ivec signed_codes(ivec a) { return _mm512_xor_si512(a, _mm512_set1_epi8(char(0x80))); }
    /// int4 codes minus 8, times signed_nibble_factor, so that they take no more instructions than unsigned codes.
    static constexpr int signed_nibble_factor = 16;
    static ivec signed_low_nibbles(ivec a) { return signed_high_nibbles(_mm512_slli_epi32(a, 4)); }
    static ivec signed_high_nibbles(ivec a) {
        return _mm512_and_si512(signed_codes(a), _mm512_set1_epi8(char(0xf0)));
    }
    /// sum + four products of uint8 (a) and int8 (b).
    static ivec add_byte_products(ivec sum, ivec a, ivec b) {
#ifdef RWORKER_EMULATED
        return _mm512_dpbusd_epi32(sum, a, b);
#else  // g++ 12 copies sums back and forth around the intrinsic
        __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
        return sum;
#endif
    }
};

}  // namespace
