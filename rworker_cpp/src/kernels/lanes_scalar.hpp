// One lane, plain float: the reference for tests of every other instruction set, and the fallback.
#pragma once

#include <stdint.h>

namespace {

struct Scalar {
    using vec = float;
    static constexpr int width = 1;
    static constexpr bool pair_dot = false;  // no product of bfloat16 pairs
    static constexpr bool half_products = false;  // no products of halves with sums of float32 either
    static constexpr int float_rows = 2, code_rows = 2;   // query rows that share a line, of floats or of codes
    static constexpr int float_sums = 16, code_sums = 16;  // vectors that fit the registers beside the operands
    static constexpr int code_chunk = 64;                  // tokens whose products with codes fit a sum, 64 or 128

    static vec set1(float x) { return x; }
    static vec load(const float* p) { return *p; }
    static void store(float* p, vec a) { *p = a; }
    static vec add(vec a, vec b) { return a + b; }
    static vec sub(vec a, vec b) { return a - b; }
    static vec mul(vec a, vec b) { return a * b; }
    static vec div(vec a, vec b) { return a / b; }
    static vec fma(vec a, vec b, vec c) { return a * b + c; }
    static vec max(vec a, vec b) { return a > b ? a : b; }  // returns b if one is NaN, as x86 does
    static vec abs(vec a) { return __builtin_fabsf(a); }
    static vec copy_sign(vec magnitude, vec sign) { return __builtin_copysignf(magnitude, sign); }
    static vec if_less(vec a, vec b, vec yes, vec no) { return a < b ? yes : no; }
    static float first(vec a) { return a; }
    static float reduce_max(vec a) { return a; }
    static float reduce_add(vec a) { return a; }
    static vec iota() { return 0.0f; }

    /// 2^n, from n + 1.5 * 2^23.
    static vec power_of_two(vec shifted) { return from_bits((bits(shifted) << 23) + 0x3f800000u); }

    static vec load_half(const uint16_t* p) {
        const uint32_t sign = uint32_t(*p & 0x8000) << 16, magnitude = *p & 0x7fff;
        if (magnitude >= 0x7c00) return from_bits(sign | 0x7f800000u | magnitude << 13);
        return from_bits(bits(from_bits(magnitude << 13) * 0x1p112f) | sign);
    }
    static vec load_bfloat(const uint16_t* p) { return from_bits(uint32_t(*p) << 16); }
    static vec load_pair_low(const uint32_t* p) { return from_bits(*p << 16); }
    static vec load_pair_high(const uint32_t* p) { return from_bits(*p & 0xffff0000u); }

    static void store_half(uint16_t* p, vec a) {
        const uint32_t sign = bits(a) >> 16 & 0x8000, magnitude = bits(a) & 0x7fffffff;
        if (magnitude > 0x7f800000u) {
            *p = uint16_t(sign | 0x7e00);
        } else if (magnitude >= 0x477ff000u) {  // rounds to 65536 or more
            *p = uint16_t(sign | 0x7c00);
        } else if (magnitude < 0x38800000u) {  // subnormal: an addition rounds it
            *p = uint16_t(sign | (bits(from_bits(magnitude) + 0.5f) - 0x3f000000u));
        } else {
            const uint32_t odd = magnitude >> 13 & 1;
            *p = uint16_t(sign | (magnitude - 0x38000000u + 0xfff + odd) >> 13);
        }
    }
    static void store_bfloat(uint16_t* p, vec a) {
        const uint32_t x = bits(a);
        *p = a != a ? uint16_t(x >> 16 | 0x40) : uint16_t((x + 0x7fff + (x >> 16 & 1)) >> 16);
    }

    using ivec = uint32_t;  // one 32-bit lane, whole or in two or four parts
    static ivec load_int(const void* p) {
        ivec x;
        __builtin_memcpy(&x, p, 4);
        return x;
    }
    static ivec broadcast_int(const void* p) { return load_int(p); }
    static ivec zero_int() { return 0; }
    static void store_int(int32_t* p, ivec a) { *p = int32_t(a); }
    static ivec to_int(vec a) { return ivec(__builtin_lrintf(a)); }  // to nearest even; arbitrary for NaN
    static vec to_float(ivec a) { return float(int32_t(a)); }
    static ivec even_bytes(ivec a) { return a & 0x00ff00ff; }
    static ivec odd_bytes(ivec a) { return a >> 8 & 0x00ff00ff; }
    static ivec low_nibbles(ivec a) { return a & 0x0f0f0f0f; }
    static ivec high_nibbles(ivec a) { return a >> 4 & 0x0f0f0f0f; }
    /// Adds a fifth bit to each byte of `nibbles`: bit `place`, 0 to 7, of the same byte of `bits`.
    static ivec join_fifth_bits(ivec nibbles, ivec bits, int place) {
        return nibbles | (bits >> place & 0x01010101) << 4;
    }
    /// sum + the two products of int16.
    static ivec add_pair_products(ivec sum, ivec a, ivec b) {
        for (int i = 0; i < 32; i += 16) sum += ivec(int16_t(a >> i) * int16_t(b >> i));
        return sum;
    }
    /// sum + the four products of uint8 and int8, in a form (int16 pairs or one int32) that `join_halves` reads. It can
    /// hold 16 sums of four products: codes of 4 bits with signed factors of 6 bits, or of 5 bits with 5 bits.
    static ivec add_quad_products(ivec sum, ivec codes, ivec factors) {
        for (int i = 0; i < 32; i += 8) sum += ivec(uint8_t(codes >> i) * int8_t(factors >> i));
        return sum;
    }
    /// high * 64 + low, from sums of quad products, as int32.
    static ivec join_halves(ivec high, ivec low) { return high * 64 + low; }

  private:
    static uint32_t bits(float a) { return __builtin_bit_cast(uint32_t, a); }
    static float from_bits(uint32_t a) { return __builtin_bit_cast(float, a); }
};

}  // namespace
