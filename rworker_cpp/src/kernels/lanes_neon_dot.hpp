// NEON with dot products of four bytes (Armv8.2's FEAT_DotProd): Graviton2, Ampere Altra, Apple's M1.
#pragma once

#include "kernels/lanes_neon.hpp"

namespace {

struct NeonDot : Neon {
    /// Codes of less than 8 bits are valid signed bytes. Sums are 32 bits wide, so halves are joined without widening.
    static ivec add_quad_products(ivec sum, ivec codes, ivec factors) {
        return vreinterpretq_u32_s32(
            vdotq_s32(vreinterpretq_s32_u32(sum), vreinterpretq_s8_u32(codes), vreinterpretq_s8_u32(factors)));
    }
    static ivec join_halves(ivec high, ivec low) { return vaddq_u32(vshlq_n_u32(high, 6), low); }
};

}  // namespace
