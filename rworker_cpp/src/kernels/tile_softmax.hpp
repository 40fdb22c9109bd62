// Softmax of up to 16 rows at once, in powers of two.
#pragma once

#include "kernels/lanes_avx512.hpp"
#include "kernels/math.hpp"

namespace {

/// 2^x for x <= 0, with an error below 3e-6; exactly 1 at 0, exactly 0 below -126, NaN for NaN.
inline __m512 exp2_nonpositive(__m512 x) {
    const __m512 f = _mm512_reduce_ps(x, 1);  // x - floor(x)
    __m512 p = _mm512_set1_ps(1.3425154611468315e-2f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.2245374768972397e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4127855896949768e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9304513931274414e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ), p, x);
}

/// Lane i of the result is the largest lane of rows[i].
inline __m512 largest_of_rows(const __m512 (&rows)[16]) {
    __m512 pairs[8], quads[4], halves[2];
    RWORKER_UNROLL
    for (int i = 0; i < 8; ++i) {
        const __m512 a = rows[2 * i], b = rows[2 * i + 1];
        pairs[i] = _mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    }
    RWORKER_UNROLL
    for (int i = 0; i < 4; ++i) {
        const __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
        quads[i] =
            _mm512_max_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    RWORKER_UNROLL
    for (int i = 0; i < 2; ++i) {
        const __m512 a = quads[2 * i], b = quads[2 * i + 1];
        halves[i] = _mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    }
    return _mm512_max_ps(_mm512_shuffle_f32x4(halves[0], halves[1], 0x88),
                         _mm512_shuffle_f32x4(halves[0], halves[1], 0xdd));
}

/// Running maxima (of scores times log2 e) of 16 rows. `renew` adds a chunk's maxima and returns the numbers to
/// subtract from scores and the factors of older sums and outputs.
struct RowMaxima {
    alignas(64) float max[16], base[16], keep[16];

    void clear() { _mm512_store_ps(max, _mm512_set1_ps(-kInfinity)); }

    void renew(const __m512 (&tops)[16]) {
        const __m512 minus_inf = _mm512_set1_ps(-kInfinity), old = _mm512_load_ps(max);
        const __m512 top = _mm512_max_ps(largest_of_rows(tops), old);
        // -inf - -inf would be NaN
        const __m512 from = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(top, minus_inf, _CMP_NEQ_UQ), top);
        _mm512_store_ps(max, top);
        _mm512_store_ps(base, from);
        _mm512_store_ps(keep, exp2_nonpositive(_mm512_sub_ps(old, from)));
    }
};

}  // namespace
