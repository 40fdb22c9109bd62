#pragma once

#include <immintrin.h>

#include "integer_kernels.hpp"

/// 16-bit products of AVX2, whose 8-bit ones (vpmaddubsw) add with saturation and may be wrong.
namespace sworker::SWORKER_ISA {
namespace {

using Code = std::int16_t;

/// Columns whose sums fit the registers at once, half a panel: four vectors, each of the two halves of four quads.
constexpr std::size_t HALF = PANEL / 2;
constexpr std::size_t VECTORS = 4;

inline __m256i four_columns(const std::int8_t* weights) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(weights)));
}

/// Add each column's two halves; two vectors of four columns make one of eight.
inline void store_sums(__m256i a, __m256i b, std::int32_t* sums) {
    const __m256i added = _mm256_permute4x64_epi64(_mm256_hadd_epi32(a, b), 0b11011000);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums), added);
}

template <std::size_t ROWS>
void multiply_half(const Code* codes, std::size_t stride, const std::int8_t* weights, std::size_t quads,
                   std::int32_t* sums) {
    __m256i total[ROWS][VECTORS];
    for (auto& row : total)
        for (__m256i& each : row) each = _mm256_setzero_si256();
    for (std::size_t quad = 0; quad < quads; ++quad, codes += stride, weights += PANEL * QUAD) {
        __m256i x[ROWS];
#pragma GCC unroll 4
        for (std::size_t row = 0; row < ROWS; ++row) {
            long long four;
            __builtin_memcpy(&four, codes + row * QUAD, sizeof four);
            x[row] = _mm256_set1_epi64x(four);
        }
#pragma GCC unroll 4
        for (std::size_t i = 0; i < VECTORS; ++i) {
            const __m256i w = four_columns(weights + i * 4 * QUAD);
#pragma GCC unroll 4
            for (std::size_t row = 0; row < ROWS; ++row)
                total[row][i] = _mm256_add_epi32(total[row][i], _mm256_madd_epi16(x[row], w));
        }
    }
#pragma GCC unroll 4
    for (std::size_t row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
        for (std::size_t i = 0; i < VECTORS; i += 2)
            store_sums(total[row][i], total[row][i + 1], sums + row * PANEL + i * 4);
}

template <std::size_t ROWS>
void multiply_rows(const PanelProduct& job, std::size_t row) {
    const Code* codes = static_cast<const Code*>(job.codes) + row * QUAD;
    for (std::size_t column = 0; column < PANEL; column += HALF)
        multiply_half<ROWS>(codes, job.rows * QUAD, job.panel + column * QUAD, job.quads,
                            job.sums + row * PANEL + column);
}

void multiply(const PanelProduct& job) {
    std::size_t row = 0;
    for (; row + 2 <= job.rows; row += 2) multiply_rows<2>(job, row);
    if (row < job.rows) multiply_rows<1>(job, row);
}

}  // namespace
}  // namespace sworker::SWORKER_ISA
