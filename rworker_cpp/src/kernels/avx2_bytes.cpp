#include "kernels/lanes_avx2_bytes.hpp"
#include "kernels/math.hpp"

namespace {

/// 2^x for x <= 0, within 3e-6 of it; exactly 1 at 0, exactly 0 below -126, NaN for NaN.
inline __m256 exp2_nonpositive(__m256 x) {
    constexpr float factors[] = {5.2245374768972397e-2f, 2.4127855896949768e-1f, 6.9304513931274414e-1f, 1.0f};
    const __m256 whole = _mm256_floor_ps(x), rest = _mm256_sub_ps(x, whole);
    __m256 p = _mm256_set1_ps(1.3425154611468315e-2f);
    RWORKER_UNROLL
    for (const float factor : factors) p = _mm256_fmadd_ps(p, rest, _mm256_set1_ps(factor));
    const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(whole), 23);
    const __m256 power = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent));
    return _mm256_andnot_ps(_mm256_cmp_ps(x, _mm256_set1_ps(-126.0f), _CMP_LT_OQ), power);
}

}  // namespace

#include "kernels/attend_bytes.hpp"

namespace {

template <>
inline void quantize_query<Avx2Bytes, DType::int4>(float* row, int padded) {
    quantize_query_bytes<Avx2Bytes, DType::int4>(row, padded);
}

void attend_int4(const AttendArgs& args) {
    if (args.alibi_slopes) return rworker::kAvx2Kernels.attend[int(DType::int4)](args);
    attend_bytes<Avx2Bytes, DType::int4>(args);
}

}  // namespace

namespace rworker {
constexpr Refinement kAvx2Bytes{"avx2", {nullptr, nullptr, nullptr, nullptr, attend_int4}};
}
