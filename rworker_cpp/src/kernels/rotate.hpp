// The rotation of an int4 cache: keys, values and queries are multiplied by Hadamard's matrix, of +-1 / sqrt(n), per
// head. A channel much larger than the others would leave few of the 16 codes for these; after rotation, all channels
// share it. Products of rotated queries and keys equal those of the originals. The matrix is its own inverse, so
// rotating an output row of rotated values rotates it back.
#pragma once

#include "kernels/transpose.hpp"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

#ifdef RWORKER_SHUFFLES
using Lanes = float __attribute__((vector_size(64)));
using LaneBits = uint32_t __attribute__((vector_size(64)));

/// Sums and differences of lanes `Stride` apart.
template <int Stride>
[[gnu::always_inline]] inline void add_neighbours(Lanes& x) {
    constexpr int S = Stride;
    constexpr auto sign = [](uint32_t lane) { return lane & S ? 0x80000000u : 0; };
    const LaneBits signs = {sign(0), sign(1), sign(2),  sign(3),  sign(4),  sign(5),  sign(6),  sign(7),
                            sign(8), sign(9), sign(10), sign(11), sign(12), sign(13), sign(14), sign(15)};
    const Lanes others = __builtin_shufflevector(x, x, 0 ^ S, 1 ^ S, 2 ^ S, 3 ^ S, 4 ^ S, 5 ^ S, 6 ^ S, 7 ^ S, 8 ^ S,
                                                 9 ^ S, 10 ^ S, 11 ^ S, 12 ^ S, 13 ^ S, 14 ^ S, 15 ^ S);
#ifdef __AVX512F__  // a product with +-1 is exact, so one rounding is enough
    x = (Lanes)_mm512_fmadd_ps((__m512)x, (__m512)(signs | 0x3f800000u), (__m512)others);
#else
    x = others + (Lanes)((LaneBits)x ^ signs);
#endif
}
#endif

#if defined(RWORKER_SHUFFLES) && defined(__AVX512F__)
/// Rotates 16 * Vectors floats in registers, then multiplies them by `factor`.
template <int Vectors>
inline void rotate_vectors(float* floats, float factor) {
    Lanes x[Vectors];
    __builtin_memcpy(x, floats, sizeof(x));
#pragma GCC unroll 16
    for (int v = 0; v < Vectors; ++v) {
        add_neighbours<1>(x[v]), add_neighbours<2>(x[v]), add_neighbours<4>(x[v]), add_neighbours<8>(x[v]);
    }
#pragma GCC unroll 16
    for (int stride = 1; stride < Vectors; stride *= 2) {
#pragma GCC unroll 16
        for (int v = 0; v < Vectors; ++v) {
            if (v & stride) continue;
            const Lanes a = x[v], b = x[v + stride];
            x[v] = a + b, x[v + stride] = a - b;
        }
    }
#pragma GCC unroll 16
    for (int v = 0; v < Vectors; ++v) x[v] *= factor;
    __builtin_memcpy(floats, x, sizeof(x));
}

/// Does the first strides of a block of at least 16 floats; returns the next stride. It multiplies the results by
/// `factor`.
template <int Vectors = 8>
inline int rotate_lanes(float* floats, int n, float factor) {
    constexpr int stride = 16 * Vectors;
    if (n < stride) {
        if constexpr (Vectors > 1) return rotate_lanes<Vectors / 2>(floats, n, factor);
        return 1;
    }
    for (int i = 0; i < n; i += stride) rotate_vectors<Vectors>(floats + i, stride == n ? factor : 1.0f);
    return stride;
}
#else
/// Fewer registers at once are faster where there are fewer.
inline int rotate_lanes(float* floats, int n, float factor) {
#ifdef RWORKER_SHUFFLES
    for (int i = 0; i + 16 <= n; i += 16) {
        Lanes x;
        __builtin_memcpy(&x, floats + i, sizeof(x));
        add_neighbours<1>(x), add_neighbours<2>(x), add_neighbours<4>(x), add_neighbours<8>(x);
        if (n == 16) x *= factor;
        __builtin_memcpy(floats + i, &x, sizeof(x));
    }
    if (n >= 16) return 16;
#endif
    return 1;
}
#endif

/// Rotates one block, n a power of two: sums and differences of floats 1, 2, 4 and so on apart. All instruction sets
/// use this order, so they have the same bits.
inline void rotate_block(float* floats, int n) {
    const float factor = 1.0f / __builtin_sqrtf(float(n));
    int stride = rotate_lanes(floats, n, factor);
    if (stride == n) return;
    for (; stride < n; stride *= 2)
        for (int first = 0; first < n; first += 2 * stride)
            for (int i = first; i < first + stride; ++i) {
                const float a = floats[i], b = floats[i + stride];
                floats[i] = a + b, floats[i + stride] = a - b;
            }
    for (int i = 0; i < n; ++i) floats[i] *= factor;
}

/// Rotates a whole head: blocks of powers of two, the largest first.
[[maybe_unused]] void rotate(float* floats, int dim) {
    for (int left = dim; left > 0;) {
        int n = 1;
        while (2 * n <= left) n *= 2;
        rotate_block(floats, n);
        floats += n, left -= n;
    }
}

}  // namespace
