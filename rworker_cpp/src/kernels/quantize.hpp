// Writing new tokens as int8 or int4 codes: a token touches its own bytes, nibbles and scales, nothing else.
#pragma once

#include "kernels/codes.hpp"

namespace {

using rworker::AppendArgs;

constexpr float kLeastScale = 0x1p-126f;  // below, quotients would lose their bits: such a row counts as zeros
constexpr float kNaN = __builtin_nanf("");

/// codes[i] = offset + (floats[i] - zero) / scale, rounded to nearest even; zeros where the scale is 0 or NaN.
template <class L>
inline void divide_row(const float* floats, int count, float zero, float scale, int offset, uint8_t* codes) {
    const bool empty = !(scale >= kLeastScale);
    for (int i = 0; i < count; i += L::width) {
        alignas(64) int32_t ints[L::width];
        const auto above = L::sub(L::load(floats + i), L::set1(zero));
        L::store_int(ints, L::to_int(empty ? L::set1(0.0f) : L::div(above, L::set1(scale))));
        for (int j = 0; j < L::width; ++j) codes[i + j] = uint8_t(ints[j] + offset);
    }
}

/// The scale of a row of int8 codes, which are stored 128 higher. A row that is not finite has a NaN for scale.
template <class L>
inline float quantize_int8(const float* floats, int count, uint8_t* codes) {
    const Bounds bounds = bounds_of<L>(floats, count);
    float scale = bounds.magnitude() / 127.0f + bounds.poison;
    if (scale < kLeastScale) scale = 0.0f;
    divide_row<L>(floats, count, 0.0f, scale, 128, codes);
    return scale;
}

/// bfloat16 bits of x, or of what lies next below.
inline uint32_t bfloat_below(float x) {
    const uint32_t bits = bits_of(x);
    return (bits >> 16) + ((bits >> 31) != 0 && (bits & 0xffff) != 0 ? 1 : 0);
}

inline uint32_t bfloat_nearest(float x) {
    const uint32_t bits = bits_of(x);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

/// The bfloat16 scale (low half) and zero (high half) of a group of int4 codes. The zero is rounded down and the scale
/// spans what is left from there, so that only the scale's own rounding can clip: 1/30 of a step at the top.
template <class L>
inline uint32_t quantize_int4(const float* floats, int count, uint8_t* codes) {
    const Bounds bounds = bounds_of<L>(floats, count);
    uint32_t zero_bits = bfloat_below(bounds.low);
    const float zero = float_of(zero_bits << 16);
    uint32_t scale_bits = bfloat_nearest((bounds.high - zero) / 15.0f);
    const float scale = float_of(scale_bits << 16) + bounds.poison;
    if (!(scale < __builtin_inff())) scale_bits = zero_bits = bits_of(kNaN) >> 16;
    if (scale < kLeastScale) scale_bits = 0;
    divide_row<L>(floats, count, zero, scale, 0, codes);
    return scale_bits | zero_bits << 16;
}

/// Codes of a whole row, and one word per header line of its tile.
template <class L, DType D>
inline void quantize_row(float* floats, int dim, uint8_t* codes, uint32_t* header) {
    const int padded = round_up16(dim);
    if constexpr (D == DType::int8) {
        header[0] = bits_of(quantize_int8<L>(floats, padded, codes));
    } else {
        for (int i = dim; i < padded; ++i) floats[i] = floats[dim - 1];  // padding must not widen the last group
        for (int g = 0; g < groups_of(dim); ++g) {
            const int first = g * kGroupDims, left = padded - first;
            header[g] = quantize_int4<L>(floats + first, left < kGroupDims ? left : kGroupDims, codes + first);
        }
    }
}

template <DType D>
inline uint8_t* store_header(const uint32_t* header, int dim, int token, uint8_t* tile) {
    const int lines = header_bytes<D>(dim) / kHeaderLineBytes;
    for (int i = 0; i < lines; ++i) reinterpret_cast<uint32_t*>(tile)[i * kTileTokens + token] = header[i];
    return tile + lines * kHeaderLineBytes;
}

/// Keys: one 4-byte lane of every line.
template <DType D>
inline void store_key_codes(const uint8_t* codes, int key_dim, int token, uint8_t* lines) {
    constexpr int pack = D == DType::int8 ? 4 : 8;
    for (int d = 0; d < key_dim; d += pack) {
        uint8_t* lane = lines + (d / pack * kTileTokens + token) * 4;
        for (int j = 0; j < 4; ++j)
            lane[j] = D == DType::int8 ? codes[d + j] : uint8_t(codes[d + j] | codes[d + 4 + j] << 4);
    }
}

/// Values: one byte or nibble of every lane of a line; the others are other tokens'.
template <DType D>
inline void store_value_codes(const uint8_t* codes, int padded_dim, int token, uint8_t* lines) {
    constexpr int pack = D == DType::int8 ? 4 : 8;
    uint8_t* bytes = lines + token / pack * padded_dim * 4 + token % 4;
    if constexpr (D == DType::int8) {
        for (int d = 0; d < padded_dim; ++d) bytes[d * 4] = codes[d];
    } else {
        const int shift = token % 8 / 4 * 4;
        for (int d = 0; d < padded_dim; ++d)
            bytes[d * 4] = uint8_t((bytes[d * 4] & (0xf0 >> shift)) | codes[d] << shift);
    }
}

template <class L, DType D>
void append_codes(const AppendArgs& args) {
    alignas(64) float floats[rworker::kMaxHeadDim];
    alignas(64) uint8_t codes[rworker::kMaxHeadDim];
    uint32_t header[groups_of(rworker::kMaxHeadDim)];
    for (int64_t position = args.begin; position < args.end; ++position) {
        const int64_t row = position - args.begin;
        const int token = int(position % kTileTokens);
        const Tile tile = tile_of(args.view, position / kTileTokens);
        widen_row<L>(args.dtype, element(args.dtype, args.keys, row * args.key_stride), args.key_dim, 1.0f, floats);
        quantize_row<L, D>(floats, args.key_dim, codes, header);
        store_key_codes<D>(codes, args.key_dim, token, store_header<D>(header, args.key_dim, token, tile.keys));
        widen_row<L>(args.dtype, element(args.dtype, args.values, row * args.value_stride), args.value_dim, 1.0f,
                     floats);
        quantize_row<L, D>(floats, args.value_dim, codes, header);
        store_value_codes<D>(codes, round_up16(args.value_dim), token,
                             store_header<D>(header, args.value_dim, token, tile.values));
    }
}

}  // namespace
