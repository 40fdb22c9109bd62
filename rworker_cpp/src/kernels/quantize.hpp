// Writes new tokens as int8 or int4 codes. A token changes only its own bytes, nibbles and scales.
#pragma once

#include "kernels/append.hpp"
#include "kernels/codes.hpp"
#include "kernels/rotate.hpp"

namespace {

constexpr float kLeastScale = 0x1p-126f;  // below this, quotients would lose bits, so such a row counts as zeros
constexpr float kNaN = __builtin_nanf("");

/// codes[i] = offset + (floats[i] - zero) / scale, rounded to nearest even; zeros where the scale is 0 or NaN.
template <class L>
inline void divide_row(const float* floats, int count, float zero, float scale, int offset, uint8_t* codes) {
    if (!(scale >= kLeastScale)) {
        __builtin_memset(codes, offset, size_t(count));
        return;
    }
    for (int i = 0; i < count; i += L::width) {
        alignas(64) int32_t ints[L::width];
        L::store_int(ints, L::to_int(L::div(L::sub(L::load(floats + i), L::set1(zero)), L::set1(scale))));
        for (int j = 0; j < L::width; ++j) codes[i + j] = uint8_t(ints[j] + offset);
    }
}

/// The scale of a row of int8 codes, which are stored 128 higher. A row with a number that is not finite has NaN as its
/// scale.
template <class L>
inline float quantize_int8(const float* floats, int count, uint8_t* codes) {
    const Bounds bounds = bounds_of<L>(floats, count);
    float scale = bounds.magnitude() / 127.0f + bounds.poison;
    if (scale < kLeastScale) scale = 0.0f;
    divide_row<L>(floats, count, 0.0f, scale, 128, codes);
    return scale;
}

/// bfloat16 bits of x, or of the next lower number.
inline uint32_t bfloat_below(float x) {
    const uint32_t bits = bits_of(x);
    return (bits >> 16) + ((bits >> 31) != 0 && (bits & 0xffff) != 0 ? 1 : 0);
}

inline uint32_t bfloat_nearest(float x) {
    const uint32_t bits = bits_of(x);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

/// The bfloat16 scale (low half) and zero (high half) of a group of int4 codes. The zero is rounded down, and the scale
/// covers the range from there. So only the rounding of the scale can clip: 1/30 of a step at the top, or 1/15 for the
/// 31 steps of keys.
template <class L>
inline uint32_t quantize_int4(const float* floats, int count, float top_code, uint8_t* codes) {
    const Bounds bounds = bounds_of<L>(floats, count);
    uint32_t zero_bits = bfloat_below(bounds.low);
    const float zero = float_of(zero_bits << 16);
    uint32_t scale_bits = bfloat_nearest((bounds.high - zero) / top_code);
    const float scale = float_of(scale_bits << 16) + bounds.poison;
    if (!(scale < __builtin_inff())) scale_bits = zero_bits = bits_of(kNaN) >> 16;
    if (scale < kLeastScale) scale_bits = 0;
    divide_row<L>(floats, count, zero, scale, 0, codes);
    return scale_bits | zero_bits << 16;
}

constexpr float kTopKeyCode = 31.0f, kTopValueCode = 15.0f;  // of int4

/// Computes codes of a whole row, and one word per scale of its tile.
template <class L, DType D>
inline void quantize_row(float* floats, int dim, float top_code, uint8_t* codes, uint32_t* header) {
    const int padded = round_up16(dim);
    if constexpr (D == DType::int8) {
        header[0] = bits_of(quantize_int8<L>(floats, padded, codes));
    } else {
        for (int i = dim; i < padded; ++i) floats[i] = floats[dim - 1];  // padding must not widen the last group
        for (int g = 0; g < groups_of(dim); ++g) {
            const int first = g * kGroupDims, left = padded - first;
            const int count = left < kGroupDims ? left : kGroupDims;
            header[g] = quantize_int4<L>(floats + first, count, top_code, codes + first);
        }
        __builtin_memset(codes + dim, 0, size_t(padded - dim));
    }
}

/// Writes one word to each header line; codes follow the header.
inline void store_header(const uint32_t* header, int bytes, int token, uint8_t* tile) {
    for (int i = 0; i < bytes / kHeaderLineBytes; ++i)
        reinterpret_cast<uint32_t*>(tile)[i * kTileTokens + token] = header[i];
}

/// Moves the fifth bits of an int4 key's codes to separate words.
inline void split_fifth_bits(uint8_t* codes, int lines, uint32_t* words) {
    for (int line = 0; line < lines; ++line) {
        uint32_t& word = words[line / kFifthBitLines];
        if (line % kFifthBitLines == 0) word = 0;
        for (int i = 0; i < 8; ++i, ++codes) {
            word |= uint32_t(*codes >> 4) << (i % 4 * 8 + fifth_bit_place(line, i / 4));
            *codes &= 15;
        }
    }
}

/// Writes keys: a row of 4-byte words.
template <DType D>
inline void pack_key_codes(const uint8_t* codes, int lines, uint8_t* row) {
    if constexpr (D == DType::int8)
        __builtin_memcpy(row, codes, size_t(lines) * 4);
    else
        for (int line = 0; line < lines; ++line)
            for (int j = 0; j < 4; ++j) row[line * 4 + j] = uint8_t(codes[line * 8 + j] | codes[line * 8 + 4 + j] << 4);
}

/// Writes values: one byte or nibble of every lane of a line. The others belong to other tokens.
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
    constexpr int pack = Stored<L, D>::pack;
    const int lines = (args.key_dim + pack - 1) / pack, padded_dim = round_up16(args.value_dim);
    alignas(64) float floats[rworker::kMaxHeadDim];
    alignas(64) uint8_t codes[rworker::kMaxHeadDim];
    uint32_t header[key_words_of(rworker::kMaxHeadDim)];
    for_tiles(args, [&](const Tile& tile, int64_t first, int begin, int end) {
        uint32_t* const keys = reinterpret_cast<uint32_t*>(tile.keys + key_header_bytes<D>(args.key_dim));
        store_keys(begin, end, lines, keys, [&](int token, uint32_t* row) {
            widen_row<L>(args.dtype, key_row(args, first + token), args.key_dim, 1.0f, floats);
            if constexpr (is_rotated(D)) rotate(floats, args.key_dim);
            quantize_row<L, D>(floats, args.key_dim, kTopKeyCode, codes, header);
            if constexpr (D == DType::int4) split_fifth_bits(codes, lines, header + groups_of(args.key_dim));
            store_header(header, key_header_bytes<D>(args.key_dim), token, tile.keys);
            pack_key_codes<D>(codes, lines, reinterpret_cast<uint8_t*>(row));
        });
        for (int token = begin; token < end; ++token) {
            widen_row<L>(args.dtype, value_row(args, first + token), args.value_dim, 1.0f, floats);
            if constexpr (is_rotated(D)) rotate(floats, args.value_dim);
            quantize_row<L, D>(floats, args.value_dim, kTopValueCode, codes, header);
            store_header(header, header_bytes<D>(args.value_dim), token, tile.values);
            store_value_codes<D>(codes, padded_dim, token, tile.values + header_bytes<D>(args.value_dim));
        }
    });
}

}  // namespace
