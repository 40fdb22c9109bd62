// Arithmetic of lanes of 8 to 64 bits.
#pragma once

#include "vectors.hpp"

RWORKER_INTRINSIC __m512i _mm512_setzero_si512() { return __m512i{}; }
RWORKER_INTRINSIC __m512i _mm512_set1_epi8(char x) { return (__m512i)(emulation::u8x64{} + uint8_t(x)); }
RWORKER_INTRINSIC __m512i _mm512_set1_epi16(short x) { return (__m512i)(emulation::u16x32{} + uint16_t(x)); }
RWORKER_INTRINSIC __m512i _mm512_set1_epi32(int x) { return (__m512i)(emulation::u32x16{} + uint32_t(x)); }
RWORKER_INTRINSIC __m512i _mm512_set1_epi64(long long x) { return (__m512i)(emulation::u64x8{} + uint64_t(x)); }

RWORKER_INTRINSIC __m512i _mm512_loadu_si512(const void* p) {
    __m512i a;
    __builtin_memcpy(&a, p, sizeof(a));
    return a;
}

RWORKER_INTRINSIC __m256i _mm256_loadu_si256(const void* p) {
    __m256i a;
    __builtin_memcpy(&a, p, sizeof(a));
    return a;
}

RWORKER_INTRINSIC void _mm512_storeu_si512(void* p, __m512i a) { __builtin_memcpy(p, &a, sizeof(a)); }
RWORKER_INTRINSIC void _mm256_storeu_si256(void* p, __m256i a) { __builtin_memcpy(p, &a, sizeof(a)); }

RWORKER_INTRINSIC __m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }
RWORKER_INTRINSIC __m512i _mm512_or_si512(__m512i a, __m512i b) { return a | b; }

RWORKER_INTRINSIC __m512i _mm512_xor_si512(__m512i a, __m512i b) { return a ^ b; }

/// `from` where the mask has a zero.
RWORKER_INTRINSIC __m512i _mm512_mask_or_epi32(__m512i from, __mmask16 mask, __m512i a, __m512i b) {
    const emulation::Lanes<uint32_t> kept(from), either(a | b);
    emulation::Lanes<uint32_t> chosen;
    for (int i = 0; i < 16; ++i) chosen[i] = mask >> i & 1 ? either[i] : kept[i];
    return chosen;
}

RWORKER_INTRINSIC __m512i _mm512_add_epi16(__m512i a, __m512i b) {
    return (__m512i)((emulation::u16x32)a + (emulation::u16x32)b);
}
RWORKER_INTRINSIC __m512i _mm512_add_epi32(__m512i a, __m512i b) {
    return (__m512i)((emulation::u32x16)a + (emulation::u32x16)b);
}

// Shifts by less than a lane's bits; the kernels know no others.
RWORKER_INTRINSIC __m512i _mm512_slli_epi32(__m512i a, unsigned n) { return (__m512i)((emulation::u32x16)a << n); }
RWORKER_INTRINSIC __m512i _mm512_srli_epi32(__m512i a, unsigned n) { return (__m512i)((emulation::u32x16)a >> n); }
RWORKER_INTRINSIC __m512i _mm512_rorv_epi32(__m512i a, __m512i n) {
    const emulation::u32x16 x = (emulation::u32x16)a, by = (emulation::u32x16)n & 31;
    return (__m512i)(x >> by | x << (-by & 31));
}
/// Computes a | (b & c), the only function of three operands that the kernels use.
RWORKER_INTRINSIC __m512i _mm512_ternarylogic_epi32(__m512i a, __m512i b, __m512i c, int) { return a | (b & c); }
RWORKER_INTRINSIC __m512i _mm512_slli_epi64(__m512i a, unsigned n) { return (__m512i)((emulation::u64x8)a << n); }
RWORKER_INTRINSIC __m512i _mm512_srli_epi64(__m512i a, unsigned n) { return (__m512i)((emulation::u64x8)a >> n); }
RWORKER_INTRINSIC __m512i _mm512_srli_epi16(__m512i a, unsigned n) {
    return (__m512i)((emulation::u16x32)a >> uint16_t(n));
}

/// Sums of pairs of products, which wrap around when all four factors are -32768.
RWORKER_INTRINSIC __m512i _mm512_madd_epi16(__m512i a, __m512i b) {
    const emulation::Lanes<int16_t> x(a), y(b);
    emulation::Lanes<uint32_t> sum;
    for (int i = 0; i < 16; ++i) sum[i] = uint32_t(x[2 * i] * y[2 * i]) + uint32_t(x[2 * i + 1] * y[2 * i + 1]);
    return sum;
}

/// Sums of pairs of products of uint8 (a) and int8 (b), each bounded to 16 bits.
RWORKER_INTRINSIC __m512i _mm512_maddubs_epi16(__m512i a, __m512i b) {
    const emulation::Lanes<uint8_t> x(a);
    const emulation::Lanes<int8_t> y(b);
    emulation::Lanes<int16_t> sum;
    for (int i = 0; i < 32; ++i) {
        const int exact = x[2 * i] * y[2 * i] + x[2 * i + 1] * y[2 * i + 1];
        sum[i] = int16_t(exact > 32767 ? 32767 : exact < -32768 ? -32768 : exact);
    }
    return sum;
}

RWORKER_INTRINSIC __m512i _mm512_dpwssd_epi32(__m512i sum, __m512i a, __m512i b) {
    return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
}

/// sum + four products of uint8 (a) and int8 (b), wrapping around and never bounded.
RWORKER_INTRINSIC __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i a, __m512i b) {
    const emulation::Lanes<uint8_t> x(a);
    const emulation::Lanes<int8_t> y(b);
    emulation::Lanes<uint32_t> total(sum);
    for (int i = 0; i < 16; ++i) {
        int products = 0;
        for (int j = 4 * i; j < 4 * i + 4; ++j) products += x[j] * y[j];
        total[i] += uint32_t(products);
    }
    return total;
}
