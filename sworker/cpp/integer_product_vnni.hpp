#pragma once

#include <immintrin.h>

#include "integer_kernels.hpp"

/// Unsigned rows with zero point 128 times signed weights; `start` takes the zero point's part away. vpdpbusd adds
/// modulo 2^32, so only the end of a sum must fit.
namespace sworker::SWORKER_ISA {
namespace {

using Code = std::uint8_t;

/// Add one quad's products to `total`, [ROWS][2] vectors of 16 columns.
template <std::size_t ROWS>
inline __attribute__((always_inline)) void add_quad(const Code* codes, const std::int8_t* weights,
                                                    __m512i (&total)[ROWS][2]) {
    const __m512i left = _mm512_loadu_si512(weights), right = _mm512_loadu_si512(weights + 64);
#pragma GCC unroll 12
    for (std::size_t row = 0; row < ROWS; ++row) {
        int four;
        __builtin_memcpy(&four, codes + row * QUAD, sizeof four);
        const __m512i x = _mm512_set1_epi32(four);
        total[row][0] = _mm512_dpbusd_epi32(total[row][0], x, left);
        total[row][1] = _mm512_dpbusd_epi32(total[row][1], x, right);
    }
}

template <std::size_t ROWS>
inline __attribute__((always_inline)) void store(const __m512i (&total)[ROWS][2], std::int32_t* sums) {
#pragma GCC unroll 12
    for (std::size_t row = 0; row < ROWS; ++row) {
        _mm512_storeu_si512(sums + row * PANEL, total[row][0]);
        _mm512_storeu_si512(sums + row * PANEL + 16, total[row][1]);
    }
}

template <std::size_t ROWS>
void multiply_rows(const PanelProduct& job) {
    __m512i total[ROWS][2];
    const __m512i left = _mm512_loadu_si512(job.start), right = _mm512_loadu_si512(job.start + 16);
#pragma GCC unroll 12
    for (std::size_t row = 0; row < ROWS; ++row) total[row][0] = left, total[row][1] = right;
    const Code* codes = static_cast<const Code*>(job.codes);
    const std::int8_t* weights = job.panel;
    const std::int8_t* ahead = job.ahead;
    for (const std::int8_t* end = weights + job.quads * PANEL * QUAD; weights != end;
         weights += PANEL * QUAD, codes += ROWS * QUAD, ahead += job.ahead_step) {
        _mm_prefetch(ahead, _MM_HINT_T1);
        _mm_prefetch(ahead + job.ahead_step / 2, _MM_HINT_T1);
        add_quad<ROWS>(codes, weights, total);
    }
    store<ROWS>(total, job.sums);
}

/// Few rows: odd quads have separate sums, so that an addition need not wait for the previous one.
template <std::size_t ROWS>
void multiply_few(const PanelProduct& job) {
    __m512i even[ROWS][2], odd[ROWS][2];
    const __m512i left = _mm512_loadu_si512(job.start), right = _mm512_loadu_si512(job.start + 16);
    for (std::size_t row = 0; row < ROWS; ++row) {
        even[row][0] = left, even[row][1] = right;
        odd[row][0] = odd[row][1] = _mm512_setzero_si512();
    }
    const Code* codes = static_cast<const Code*>(job.codes);
    const std::int8_t* weights = job.panel;
    for (std::size_t pair = 0; pair < job.quads / 2; ++pair) {
        add_quad<ROWS>(codes, weights, even);
        add_quad<ROWS>(codes + ROWS * QUAD, weights + PANEL * QUAD, odd);
        codes += 2 * ROWS * QUAD;
        weights += 2 * PANEL * QUAD;
    }
    if (job.quads % 2) add_quad<ROWS>(codes, weights, even);
    for (std::size_t row = 0; row < ROWS; ++row)
        for (std::size_t half = 0; half < 2; ++half)
            even[row][half] = _mm512_add_epi32(even[row][half], odd[row][half]);
    store<ROWS>(even, job.sums);
}

void multiply(const PanelProduct& job) {
    static_assert(MOST_ROWS == 12);
    switch (job.rows) {
        case 1: return multiply_few<1>(job);
        case 2: return multiply_few<2>(job);
        case 3: return multiply_few<3>(job);
        case 4: return multiply_rows<4>(job);
        case 5: return multiply_rows<5>(job);
        case 6: return multiply_rows<6>(job);
        case 7: return multiply_rows<7>(job);
        case 8: return multiply_rows<8>(job);
        case 9: return multiply_rows<9>(job);
        case 10: return multiply_rows<10>(job);
        case 11: return multiply_rows<11>(job);
        default: return multiply_rows<12>(job);
    }
}

}  // namespace
}  // namespace sworker::SWORKER_ISA
