#pragma once

#include "floats.hpp"
#include "integer_kernels.hpp"

/// Activation, rotation and quantization of one row; every instruction set computes the same operations in one order.
namespace sworker::SWORKER_ISA {
namespace {

typedef float F32x16 __attribute__((vector_size(64)));
typedef std::int32_t I32x16 __attribute__((vector_size(64)));

/// 1.5 · 2^23: added to a small float, it leaves the nearest integer in the low bits, ties to even.
constexpr float ROUNDER = 12582912.0f;
constexpr std::int32_t ROUNDER_BITS = 0x4B400000;

/// x within ±most; NaN stays NaN. By integers: compilers split float comparisons into paths, and compute each of them.
inline float clipped(float x, float most) {
    const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, x), magnitude = bits & 0x7fffffffu;
    const std::uint32_t limit = __builtin_bit_cast(std::uint32_t, most);
    const bool is_beyond = magnitude > limit && magnitude <= 0x7f800000u;
    return __builtin_bit_cast(float, is_beyond ? limit | (bits & 0x80000000u) : bits);
}

/// e^x within 2 units of rounding, with a fixed order of operations; x is clipped to ±87.
inline float exponential(float x) {
    x = clipped(x, 87.0f);
    const float shifted = x * 1.44269504f + ROUNDER;
    const float whole = shifted - ROUNDER;
    const float rest = (x - whole * 0.693359375f) - whole * -2.12194440e-4f;
    float power = 1.9875691500e-4f;
    power = power * rest + 1.3981999507e-3f;
    power = power * rest + 8.3334519073e-3f;
    power = power * rest + 4.1665795894e-2f;
    power = power * rest + 1.6666665459e-1f;
    power = power * rest + 5.0000001201e-1f;
    power = power * rest * rest + rest + 1.0f;
    const std::int32_t exponent = __builtin_bit_cast(std::int32_t, shifted) - ROUNDER_BITS + 127;
    return power * __builtin_bit_cast(float, exponent << 23);
}

inline float silu(float x) {
    return x / (1.0f + exponential(-x));
}

/// 0.5 · x · (1 + tanh(z)) = x / (1 + e^(-2z)).
inline float gelu_tanh(float x) {
    const float z = 0.7978845608f * (x + 0.044715f * x * x * x);
    return x / (1.0f + exponential(-2.0f * z));
}

template <typename T>
void read_row(const SourceRows<T>& source, std::size_t row, float* __restrict__ y) {
    const T* __restrict__ x = source.x + row * source.x_stride;
    const T* __restrict__ gate = source.gate + (source.gate ? row * source.gate_stride : 0);
    const std::size_t width = source.width;
    switch (source.activation) {
        case Activation::none:
            for (std::size_t i = 0; i < width; ++i) y[i] = load(x[i]);
            break;
        case Activation::silu:
            for (std::size_t i = 0; i < width; ++i)
                y[i] = round_to<T>(round_to<T>(silu(load(gate[i]))) * load(x[i]));
            break;
        case Activation::gelu_tanh:
            for (std::size_t i = 0; i < width; ++i)
                y[i] = round_to<T>(round_to<T>(gelu_tanh(load(gate[i]))) * load(x[i]));
            break;
    }
    for (std::size_t i = width; i % LANES; ++i) y[i] = 0.0f;
}

/// Butterflies between lanes that are STRIDE apart: sums in the lower, differences in the upper.
template <int STRIDE>
inline __attribute__((always_inline)) void mix_lanes(F32x16& v) {
    F32x16 sign;
    for (int lane = 0; lane < 16; ++lane) sign[lane] = lane & STRIDE ? -1.0f : 1.0f;
#ifdef __clang__
    const F32x16 other = __builtin_shufflevector(
        v, v, 0 ^ STRIDE, 1 ^ STRIDE, 2 ^ STRIDE, 3 ^ STRIDE, 4 ^ STRIDE, 5 ^ STRIDE, 6 ^ STRIDE, 7 ^ STRIDE,
        8 ^ STRIDE, 9 ^ STRIDE, 10 ^ STRIDE, 11 ^ STRIDE, 12 ^ STRIDE, 13 ^ STRIDE, 14 ^ STRIDE, 15 ^ STRIDE);
#else
    const I32x16 swap = {0 ^ STRIDE,  1 ^ STRIDE,  2 ^ STRIDE,  3 ^ STRIDE, 4 ^ STRIDE,  5 ^ STRIDE,
                         6 ^ STRIDE,  7 ^ STRIDE,  8 ^ STRIDE,  9 ^ STRIDE, 10 ^ STRIDE, 11 ^ STRIDE,
                         12 ^ STRIDE, 13 ^ STRIDE, 14 ^ STRIDE, 15 ^ STRIDE};
    const F32x16 other = __builtin_shuffle(v, swap);
#endif
    v = other + v * sign;
}

inline void rotate_lanes(F32x16* v, std::size_t count, std::size_t block) {
    for (std::size_t i = 0; i < count; ++i) {
        F32x16 each = v[i];
        if (block >= 2) mix_lanes<1>(each);
        if (block >= 4) mix_lanes<2>(each);
        if (block >= 8) mix_lanes<4>(each);
        if (block >= 16) mix_lanes<8>(each);
        v[i] = each;
    }
}

/// One stage of butterflies between vectors `apart` vectors from each other.
inline void mix_vectors(F32x16* v, std::size_t count, std::size_t apart) {
    for (std::size_t first = 0; first < count; first += 2 * apart)
        for (std::size_t i = first; i < first + apart; ++i) {
            const F32x16 a = v[i], b = v[i + apart];
            v[i] = a + b;
            v[i + apart] = a - b;
        }
}

/// Two stages in one pass: `apart`, and twice as far.
inline void mix_vectors_twice(F32x16* v, std::size_t count, std::size_t apart) {
    for (std::size_t first = 0; first < count; first += 4 * apart)
        for (std::size_t i = first; i < first + apart; ++i) {
            const F32x16 a = v[i], b = v[i + apart], c = v[i + 2 * apart], d = v[i + 3 * apart];
            const F32x16 e = a + b, f = a - b, g = c + d, h = c - d;
            v[i] = e + g;
            v[i + apart] = f + h;
            v[i + 2 * apart] = e - g;
            v[i + 3 * apart] = f - h;
        }
}

/// Reflect each set of PARTS vectors that are `apart` vectors apart: twice their mean, less each of them.
template <int PARTS>
void reflect_vectors(F32x16* v, std::size_t count, std::size_t apart) {
    for (std::size_t first = 0; first < count; first += PARTS * apart)
        for (std::size_t i = first; i < first + apart; ++i) {
            F32x16 sum = v[i];
            for (int part = 1; part < PARTS; ++part) sum = sum + v[i + part * apart];
            sum = sum * (2.0f / PARTS);
            for (int part = 0; part < PARTS; ++part) v[i + part * apart] = sum - v[i + part * apart];
        }
}

/// Mix the `blocks` neighbours of Hadamard blocks that lie `apart` vectors apart; `blocks` has the factors 3, 5 and 7.
inline void mix_blocks(F32x16* v, std::size_t count, std::size_t apart, std::size_t blocks) {
    for (; blocks % 3 == 0; blocks /= 3, apart *= 3) reflect_vectors<3>(v, count, apart);
    for (; blocks % 5 == 0; blocks /= 5, apart *= 5) reflect_vectors<5>(v, count, apart);
    for (; blocks % 7 == 0; blocks /= 7, apart *= 7) reflect_vectors<7>(v, count, apart);
}

inline float peak_of(const F32x16* v, std::size_t count) {
    I32x16 most = {};
    for (std::size_t i = 0; i < count; ++i) {
        const I32x16 magnitude = (I32x16)v[i] & 0x7fffffff;
        most = magnitude > most ? magnitude : most;
    }
    std::int32_t peak = 0;
    for (int lane = 0; lane < 16; ++lane) peak = most[lane] > peak ? most[lane] : peak;
    return __builtin_bit_cast(float, peak);
}

/// Multiply each block of the row by its matrix, without the factor of 1 / sqrt(hadamard_part(block)).
template <typename T>
float rotate(const SourceRows<T>& source, std::size_t row, float* y) {
    read_row(source, row, y);
    F32x16* v = reinterpret_cast<F32x16*>(y);
    const std::size_t count = (source.width + LANES - 1) / LANES, block = source.block & -source.block;
    rotate_lanes(v, count, block);
    std::size_t apart = 1;
    for (; apart * 2 * LANES < block; apart *= 4) mix_vectors_twice(v, count, apart);
    if (apart * LANES < block) mix_vectors(v, count, apart);
    if (block < source.block) mix_blocks(v, count, block / LANES, source.block / block);
    return peak_of(v, count);
}

inline float inverse_scale(float peak) {
    return peak < LEAST_PEAK ? 0.0f : 127.0f / peak;
}

inline std::int32_t code_of(float value, float inverse) {
    return __builtin_bit_cast(std::int32_t, value * inverse + ROUNDER) - ROUNDER_BITS;
}

inline void quantize_plain(const float* __restrict__ y, std::size_t width, float peak, std::int8_t* __restrict__ codes) {
    const float inverse = inverse_scale(peak);
    for (std::size_t i = 0; i < width; ++i) codes[i] = std::int8_t(code_of(y[i], inverse));
}

/// `Code`: uint8 with zero point 128, or int16.
template <typename Code>
void quantize(const float* __restrict__ y, std::size_t width, float peak, const CodePlace& place) {
    constexpr std::int32_t zero = sizeof(Code) == 1 ? 128 : 0;
    const float inverse = inverse_scale(peak);
    Code* codes = static_cast<Code*>(place.codes);
    for (std::size_t i = 0; i < width; i += LANES) {  // y is padded with zeros to LANES
        Code some[LANES];
        for (std::size_t lane = 0; lane < LANES; ++lane) some[lane] = Code(code_of(y[i + lane], inverse) + zero);
        for (std::size_t quad = 0; quad < LANES && i + quad < width; quad += QUAD)
            __builtin_memcpy(codes + (i + quad) / QUAD * place.quad_stride, some + quad, QUAD * sizeof(Code));
    }
}

}  // namespace
}  // namespace sworker::SWORKER_ISA
