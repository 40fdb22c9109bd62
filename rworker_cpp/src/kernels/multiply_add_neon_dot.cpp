#include "kernels/lanes_neon_dot.hpp"
#include "kernels/multiply_add.hpp"

namespace {

struct Integers {
    using vec = uint32x4_t;
    static constexpr int width = 16;
    static vec set1(int x) { return vreinterpretq_u32_s8(vdupq_n_s8(int8_t(x))); }
    static vec add(vec a, vec b) { return vaddq_u32(a, b); }
    static vec multiply_add(vec a, vec b, vec sum) { return NeonDot::add_quad_products(sum, a, b); }
    static float first(vec a) { return float(int32_t(vgetq_lane_u32(a, 0))); }
};

}  // namespace

namespace rworker {
constexpr MultiplyAdds kNeonDotMultiplyAdds{"neon_dot", {nullptr, nullptr, multiply_add_integers<Integers, 16>}};
}
