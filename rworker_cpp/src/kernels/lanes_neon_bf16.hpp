// NEON with dot products of bfloat16 pairs, of bytes of which one has a sign, and of float16 (FEAT_BF16, FEAT_I8MM,
// FEAT_FHM): Graviton3 and 4, Grace, Apple from the M2 on. Factors are rounded to bfloat16 or float16. Sums are
// float32; those of pairs are rounded to odd.
#pragma once

#include "kernels/lanes_neon_dot.hpp"

namespace {

struct NeonBf16 : NeonDot {
    static constexpr bool pair_dot = true, half_products = true;

    /// 32 bits at `p`, which instructions can multiply with all lanes without copies.
    static uint32x2_t broadcast_int(const void* p) {
        uint32_t lane;
        __builtin_memcpy(&lane, p, sizeof(lane));
        return vcreate_u32(lane);
    }

    static vec add_pair_dot(vec sum, ivec a, uint32x2_t b) {
        return vbfdotq_lane_f32(sum, vreinterpretq_bf16_u32(a), vreinterpret_bf16_u32(b), 0);
    }

    /// Turns floats[0..count) into pairs of bfloat16, in the first half of their memory; count % 16 == 0.
    static void pack_pairs(float* floats, int count) {
        for (int i = 0; i < count; i += 2 * width) {
            const bfloat16x8_t first = vcvtq_low_bf16_f32(load(floats + i));
            const bfloat16x8_t all = vcvtq_high_bf16_f32(first, load(floats + i + width));
            vst1q_u32(reinterpret_cast<uint32_t*>(floats + i / 2), vreinterpretq_u32_bf16(all));
        }
    }

    static ivec load_four_halves(const void* p) {
        return vreinterpretq_u32_u16(vcombine_u16(vld1_u16(static_cast<const uint16_t*>(p)), vdup_n_u16(0)));
    }
    /// sum + the first four of eight halves times the half that pack_halves stored.
    static vec add_low_halves(vec sum, ivec a, uint32x2_t b) {
        return vfmlalq_lane_low_f16(sum, vreinterpretq_f16_u32(a), vreinterpret_f16_u32(b), 0);
    }
    /// sum + the last four of eight halves times the half that pack_halves stored.
    static vec add_high_halves(vec sum, ivec a, uint32x2_t b) {
        return vfmlalq_lane_high_f16(sum, vreinterpretq_f16_u32(a), vreinterpret_f16_u32(b), 0);
    }

    /// Turns each of floats[0..count) into a half in its first two bytes; count % 4 == 0.
    static void pack_halves(float* floats, int count) {
        for (int i = 0; i < count; i += width) {
            const uint16x4_t halves = vreinterpret_u16_f16(vcvt_f16_f32(load(floats + i)));
            vst1q_u32(reinterpret_cast<uint32_t*>(floats + i), vmovl_u16(halves));
        }
    }
};

/// Codes times bytes, four at once.
struct NeonBytes : NeonDot {
    using Wide = NeonDot;
    static constexpr bool joins_parts = false;

    static ivec as_int(vec a) { return vreinterpretq_u32_f32(a); }
    static void store_bytes(uint8_t* p, ivec a) {
        const uint16x4_t halves = vmovn_u32(a);
        const uint32_t bytes = vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(halves, halves))), 0);
        __builtin_memcpy(p, &bytes, sizeof(bytes));
    }
    /// Codes are stored 128 higher.
    static ivec signed_codes(ivec a) { return veorq_u32(a, vdupq_n_u32(0x80808080u)); }
    /// int4 codes minus 8, times signed_nibble_factor.
    static constexpr int signed_nibble_factor = 16;
    static ivec signed_low_nibbles(ivec a) {
        return signed_codes(vreinterpretq_u32_u8(vshlq_n_u8(vreinterpretq_u8_u32(a), 4)));
    }
    static ivec signed_high_nibbles(ivec a) { return vandq_u32(signed_codes(a), vdupq_n_u32(0xf0f0f0f0u)); }
    /// sum + four products of uint8 (a) and int8 (b).
    static ivec add_byte_products(ivec sum, ivec a, ivec b) {
        return vreinterpretq_u32_s32(
            vusdotq_s32(vreinterpretq_s32_u32(sum), vreinterpretq_u8_u32(a), vreinterpretq_s8_u32(b)));
    }
};

}  // namespace
