// Four lanes: NEON (Advanced SIMD) as every 64-bit ARM has it.
#pragma once

#include <arm_neon.h>
#include <stdint.h>

namespace {

struct Neon {
    using vec = float32x4_t;
    static constexpr int width = 4;
    static constexpr bool pair_dot = false;  // no product of bfloat16 pairs
    static constexpr bool half_products = false;  // no products of halves with sums of float32 either
    static constexpr int float_rows = 6, code_rows = 4;
    static constexpr int float_sums = 24, code_sums = 16, code_chunk = 64;

    static vec set1(float x) { return vdupq_n_f32(x); }
    static vec load(const float* p) { return vld1q_f32(p); }
    static void store(float* p, vec a) { vst1q_f32(p, a); }
    static vec add(vec a, vec b) { return vaddq_f32(a, b); }
    static vec sub(vec a, vec b) { return vsubq_f32(a, b); }
    static vec mul(vec a, vec b) { return vmulq_f32(a, b); }
    static vec div(vec a, vec b) { return vdivq_f32(a, b); }
    static vec fma(vec a, vec b, vec c) { return vfmaq_f32(c, a, b); }
    static vec max(vec a, vec b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }  // returns b if one is NaN, as x86 does
    static vec abs(vec a) { return vabsq_f32(a); }
    static vec copy_sign(vec magnitude, vec sign) { return vbslq_f32(vdupq_n_u32(0x80000000u), sign, magnitude); }
    static vec if_less(vec a, vec b, vec yes, vec no) { return vbslq_f32(vcltq_f32(a, b), yes, no); }
    static float first(vec a) { return vgetq_lane_f32(a, 0); }
    static float reduce_max(vec a) { return vmaxvq_f32(a); }
    static float reduce_add(vec a) { return vaddvq_f32(a); }
    static vec iota() { return vec{0.0f, 1.0f, 2.0f, 3.0f}; }

    static vec power_of_two(vec shifted) {
        const int32x4_t exponent = vshlq_n_s32(vreinterpretq_s32_f32(shifted), 23);
        return vreinterpretq_f32_s32(vaddq_s32(exponent, vdupq_n_s32(0x3f800000)));
    }

    static vec load_half(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
    static vec load_bfloat(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
    static vec load_pair_low(const uint32_t* p) { return vreinterpretq_f32_u32(vshlq_n_u32(vld1q_u32(p), 16)); }
    static vec load_pair_high(const uint32_t* p) {
        return vreinterpretq_f32_u32(vandq_u32(vld1q_u32(p), vdupq_n_u32(0xffff0000u)));
    }

    static void store_half(uint16_t* p, vec a) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(a))); }
    /// Rounds to nearest even; a NaN stays NaN.
    static void store_bfloat(uint16_t* p, vec a) {
        const uint32x4_t x = vreinterpretq_u32_f32(a), odd = vandq_u32(vshrq_n_u32(x, 16), vdupq_n_u32(1));
        const uint32x4_t even = vaddq_u32(vaddq_u32(x, vdupq_n_u32(0x7fff)), odd);
        const uint32x4_t nan = vorrq_u32(x, vdupq_n_u32(0x400000));
        vst1_u16(p, vshrn_n_u32(vbslq_u32(vceqq_f32(a, a), even, nan), 16));
    }

    using ivec = uint32x4_t;  // 32-bit lanes, whole or in two or four parts
    static ivec load_int(const void* p) { return vreinterpretq_u32_u8(vld1q_u8(static_cast<const uint8_t*>(p))); }
    static ivec broadcast_int(const void* p) {
        uint32_t lane;
        __builtin_memcpy(&lane, p, sizeof(lane));
        return vdupq_n_u32(lane);
    }
    static ivec zero_int() { return vdupq_n_u32(0); }
    static void store_int(int32_t* p, ivec a) { vst1q_s32(p, vreinterpretq_s32_u32(a)); }
    static ivec to_int(vec a) { return vreinterpretq_u32_s32(vcvtnq_s32_f32(a)); }
    static vec to_float(ivec a) { return vcvtq_f32_s32(vreinterpretq_s32_u32(a)); }
    static ivec even_bytes(ivec a) { return vandq_u32(a, vdupq_n_u32(0x00ff00ff)); }
    static ivec odd_bytes(ivec a) { return vreinterpretq_u32_u16(vshrq_n_u16(vreinterpretq_u16_u32(a), 8)); }
    static ivec low_nibbles(ivec a) { return vandq_u32(a, vdupq_n_u32(0x0f0f0f0f)); }
    static ivec high_nibbles(ivec a) { return vreinterpretq_u32_u8(vshrq_n_u8(vreinterpretq_u8_u32(a), 4)); }
    static ivec join_fifth_bits(ivec nibbles, ivec bits, int place) {
        const uint8x16_t fifth = vshlq_u8(vreinterpretq_u8_u32(bits), vdupq_n_s8(int8_t(4 - place)));
        return vorrq_u32(nibbles, vandq_u32(vreinterpretq_u32_u8(fifth), vdupq_n_u32(0x10101010)));
    }
    static ivec add_pair_products(ivec sum, ivec a, ivec b) {
        const int16x8_t x = vreinterpretq_s16_u32(a), y = vreinterpretq_s16_u32(b);
        const int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y)), high = vmull_high_s16(x, y);
        return vaddq_u32(sum, vreinterpretq_u32_s32(vpaddq_s32(low, high)));
    }
    /// Sums of pairs, of 16 bits; all codes and factors have less than 8 bits.
    static ivec add_quad_products(ivec sum, ivec codes, ivec factors) {
        const int8x16_t x = vreinterpretq_s8_u32(codes), y = vreinterpretq_s8_u32(factors);
        const int16x8_t low = vmull_s8(vget_low_s8(x), vget_low_s8(y)), high = vmull_high_s8(x, y);
        return vreinterpretq_u32_s16(vaddq_s16(vreinterpretq_s16_u32(sum), vpaddq_s16(low, high)));
    }
    static ivec join_halves(ivec high, ivec low) {
        const int32x4_t highs = vshlq_n_s32(vpaddlq_s16(vreinterpretq_s16_u32(high)), 6);
        return vreinterpretq_u32_s32(vpadalq_s16(highs, vreinterpretq_s16_u32(low)));
    }
};

}  // namespace
