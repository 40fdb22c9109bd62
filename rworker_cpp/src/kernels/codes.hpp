// Tiles of the quantised dtypes: header lines of scales, then lines of codes in lanes of 4 bytes.
#pragma once

#include "kernels/stored.hpp"

namespace {

using rworker::groups_of;
using rworker::is_quantized;
using rworker::is_rotated;
using rworker::key_words_of;
using rworker::kGroupDims;

/// A line of keys has 16 tokens with `pack` dims each; a line of values has `padded_dim` dims with `pack` tokens each.
template <class L>
struct Stored<L, DType::int8> {
    static constexpr int pack = 4, lane_bytes = 4;
    static constexpr bool pair_dot = false, packs_factors = false;
};

template <class L>
struct Stored<L, DType::int4> {
    static constexpr int pack = 8, lane_bytes = 4;
    static constexpr bool pair_dot = false, packs_factors = false;
};

/// Returns the low or the high nibbles of all bytes.
template <class L, int Half>
inline typename L::ivec nibbles(typename L::ivec line) {
    if constexpr (Half == 0) return L::low_nibbles(line);
    if constexpr (Half == 1) return L::high_nibbles(line);
}

constexpr int kHeaderLineBytes = 4 * kTileTokens;  // one word per token: a float32 scale, or a bfloat16 scale and zero

/// For values.
template <DType D>
constexpr int header_bytes(int dim) {
    return kHeaderLineBytes * (D == DType::int8 ? 1 : int(groups_of(dim)));
}

template <DType D>
constexpr int key_header_bytes(int dim) {
    return kHeaderLineBytes * (D == DType::int8 ? 1 : int(key_words_of(dim)));
}

constexpr int kFifthBitLines = rworker::kFifthBitDims / 8;  // lines of int4 keys whose fifth bits share a word

/// Position, within its byte, of the fifth bit of a line's low or high nibbles.
constexpr int fifth_bit_place(int line, int half) { return line % kFifthBitLines * 2 + half; }

/// Returns codes of five bits of half a line of int4 keys: line `line` at `codes`, with fifth bits at `bits`.
template <class L, int Half>
[[gnu::always_inline]] inline typename L::ivec key_codes(const uint8_t* codes, const uint8_t* bits, int line) {
    return L::join_fifth_bits(nibbles<L, Half>(L::load_int(codes)), L::load_int(bits), fifth_bit_place(line, Half));
}

inline uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
inline float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

/// Largest value, smallest value, and a number that is 0, or NaN where a value is not finite. `count` is a multiple of
/// 16.
struct Bounds {
    float high, low, poison;
    float magnitude() const { return high > -low ? high : -low; }
};

template <class L>
inline Bounds bounds_of(const float* floats, int count) {
    using vec = typename L::vec;
    const vec none = L::set1(0.0f);
    vec high = L::load(floats), negated = L::sub(none, high), poison = L::mul(high, none);
    for (int i = L::width; i < count; i += L::width) {
        const vec x = L::load(floats + i);
        high = L::max(high, x);
        negated = L::max(negated, L::sub(none, x));
        poison = L::add(poison, L::mul(x, none));
    }
    return {L::reduce_max(high), -L::reduce_max(negated), L::reduce_add(poison)};
}

}  // namespace
