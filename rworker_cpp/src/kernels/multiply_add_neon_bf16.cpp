#include "kernels/lanes_neon_bf16.hpp"
#include "kernels/multiply_add.hpp"

namespace {

struct Pairs {
    using vec = uint32x4_t;
    static constexpr int width = 8;
    static vec set1(int x) { return vreinterpretq_u32_s16(vdupq_n_s16(int16_t(x))); }  // bits of a tiny number
    static vec add(vec a, vec b) {
        return vreinterpretq_u32_f32(vaddq_f32(vreinterpretq_f32_u32(a), vreinterpretq_f32_u32(b)));
    }
    static vec multiply_add(vec a, vec b, vec sum) {
        const bfloat16x8_t pairs = vreinterpretq_bf16_u32(a), others = vreinterpretq_bf16_u32(b);
        return vreinterpretq_u32_f32(vbfdotq_f32(vreinterpretq_f32_u32(sum), pairs, others));
    }
    static float first(vec a) { return vgetq_lane_f32(vreinterpretq_f32_u32(a), 0); }
};

}  // namespace

namespace rworker {
constexpr MultiplyAdds kNeonBf16MultiplyAdds{"neon_bf16", {nullptr, multiply_add_integers<Pairs, 16>}};
}
