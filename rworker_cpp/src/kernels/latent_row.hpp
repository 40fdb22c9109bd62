// A latent row of an int8 or int4 cache: codes of the token's values, their scales, and its further dims in bfloat16.
#pragma once

#include "kernels/rotate.hpp"
#include "rworker/kernels.hpp"

namespace {

using rworker::DType;

/// Where the parts of a row of `dim` values begin; codes are at 0. The codes of the first half of an int4 group's dims
/// are the low bits of its bytes, those of the second half the high bits.
struct LatentRow {
    int64_t scales, rest;

    constexpr LatentRow(DType dtype, int64_t dim)
        : scales(dtype == DType::int8 ? dim : (dim + 1) / 2),
          rest(scales + 4 * (dtype == DType::int8 ? 1 : rworker::groups_of(dim))) {}
};

/// Dims of the group of int4 codes that begins with `first`, and half of them, rounded up.
struct LatentGroup {
    int dims, half;

    constexpr LatentGroup(int first, int dim)
        : dims(dim - first < rworker::kGroupDims ? dim - first : rworker::kGroupDims), half((dims + 1) / 2) {}
};

inline float float_of_bfloat(uint32_t bits) { return __builtin_bit_cast(float, bits << 16); }

/// A row as floats, rotated back; `rest` dims follow the dims with codes.
template <DType D>
inline void read_latent(const uint8_t* row, int dim, int rest, float* floats) {
    const LatentRow at(D, dim);
    if constexpr (D == DType::int8) {
        float scale;
        __builtin_memcpy(&scale, row + at.scales, 4);
        for (int d = 0; d < dim; ++d) floats[d] = scale * float(int(row[d]) - 128);
    } else {
        for (int first = 0; first < dim; first += rworker::kGroupDims) {
            const LatentGroup group(first, dim);
            const uint8_t* const codes = row + first / 2;
            uint32_t terms;
            __builtin_memcpy(&terms, row + at.scales + first / rworker::kGroupDims * 4, 4);
            const float scale = float_of_bfloat(terms & 0xffff), zero = float_of_bfloat(terms >> 16);
            float *const low = floats + first, *const high = low + group.half;
            for (int i = 0; i < group.half; ++i) low[i] = zero + scale * float(codes[i] & 15);
            for (int i = 0; i < group.dims - group.half; ++i) high[i] = zero + scale * float(codes[i] >> 4);
        }
        rotate(floats, dim);
    }
    for (int d = 0; d < rest; ++d) {
        uint16_t bits;
        __builtin_memcpy(&bits, row + at.rest + 2 * d, 2);
        floats[dim + d] = float_of_bfloat(bits);
    }
}

}  // namespace
