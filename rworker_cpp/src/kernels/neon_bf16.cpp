#include "kernels/lanes_neon_bf16.hpp"
#include "kernels/math.hpp"

namespace {

/// 2^x for x <= 0, within 3e-6 of it; exactly 1 at 0, exactly 0 below -126, NaN for NaN.
inline float32x4_t exp2_nonpositive(float32x4_t x) {
    constexpr float factors[] = {5.2245374768972397e-2f, 2.4127855896949768e-1f, 6.9304513931274414e-1f, 1.0f};
    const float32x4_t whole = vrndmq_f32(x), rest = vsubq_f32(x, whole);
    float32x4_t p = vdupq_n_f32(1.3425154611468315e-2f);
    RWORKER_UNROLL
    for (const float factor : factors) p = vfmaq_f32(vdupq_n_f32(factor), p, rest);
    const int32x4_t exponent = vshlq_n_s32(vcvtq_s32_f32(whole), 23);
    const int32x4_t power = vaddq_s32(vreinterpretq_s32_f32(p), exponent);
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_s32(power), vcltq_f32(x, vdupq_n_f32(-126.0f))));
}

}  // namespace

#include "kernels/attend_bytes.hpp"
#include "kernels/score.hpp"

namespace {

template <>
inline void quantize_query<NeonBytes, DType::int8>(float* row, int padded) {
    quantize_query_bytes<NeonBytes, DType::int8>(row, padded);
}

template <>
inline void quantize_query<NeonBytes, DType::int4>(float* row, int padded) {
    quantize_query_bytes<NeonBytes, DType::int4>(row, padded);
}

template <DType D>
void attend_codes(const AttendArgs& args) {
    if (!rworker::is_for_bytes(D, args.group) || args.alibi_slopes)
        return D == DType::int8 ? rworker::kNeonKernels.attend[int(D)](args) : rworker::kNeonDot.attend[int(D)](args);
    attend_bytes<NeonBytes, D>(args);
}

}  // namespace

namespace rworker {
constexpr Refinement kNeonBf16{"neon_bf16",
                               {nullptr, attend<NeonBf16, DType::float16>, attend<NeonBf16, DType::bfloat16>,
                                attend_codes<DType::int8>, attend_codes<DType::int4>},
                               nullptr,
                               {nullptr, score<NeonBf16, DType::float16>, score<NeonBf16, DType::bfloat16>}};
}
