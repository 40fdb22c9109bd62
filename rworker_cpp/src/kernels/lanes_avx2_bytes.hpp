// AVX2 with products of int4 codes and bytes. Sums of two products saturate 16 bits for codes of eight bits, so int8
// codes keep factors of 16 bits.
#pragma once

#include "kernels/lanes_avx2.hpp"

namespace {

struct Avx2Bytes : Avx2 {
    using Wide = Avx2;
    static constexpr bool joins_parts = true;  // products of a line's low and high nibbles are added in 16 bits

    static ivec as_int(vec a) { return _mm256_castps_si256(a); }
    static void store_bytes(uint8_t* p, ivec a) {
        const __m256i order = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 4, 8, 12, -1,
                                               -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
        const __m256i bytes = _mm256_shuffle_epi8(a, order);
        const __m128i both =
            _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
        _mm_storel_epi64((__m128i*)p, both);
    }
    /// int4 codes minus 8, times signed_nibble_factor.
    static constexpr int signed_nibble_factor = 1;
    static ivec signed_low_nibbles(ivec a) { return _mm256_sub_epi8(low_nibbles(a), _mm256_set1_epi8(8)); }
    static ivec signed_high_nibbles(ivec a) { return _mm256_sub_epi8(high_nibbles(a), _mm256_set1_epi8(8)); }
    /// sum + two times four products of uint8 (a) and int8 (b), one of which is an int4 code: at most 4 x 31 x 127 or 4
    /// x 255 x 8, in 16 bits.
    static ivec add_byte_products(ivec sum, ivec a, ivec b, ivec c, ivec d) {
        const ivec products = _mm256_add_epi16(_mm256_maddubs_epi16(a, b), _mm256_maddubs_epi16(c, d));
        return add_pair_products(sum, products, _mm256_set1_epi16(1));
    }
};

}  // namespace
