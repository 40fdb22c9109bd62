#include "kernels/lanes_neon.hpp"
#include "kernels/multiply_add.hpp"

namespace {

struct Integers {
    using vec = uint32x4_t;
    static constexpr int width = 8;
    static vec set1(int x) { return vreinterpretq_u32_s16(vdupq_n_s16(int16_t(x))); }
    static vec add(vec a, vec b) { return vaddq_u32(a, b); }
    static vec multiply_add(vec a, vec b, vec sum) { return Neon::add_pair_products(sum, a, b); }
    static float first(vec a) { return float(int32_t(vgetq_lane_u32(a, 0))); }
};

}  // namespace

namespace rworker {
constexpr MultiplyAdds kNeonMultiplyAdds{
    "neon", {multiply_add_floats<Neon>, multiply_add_floats<Neon>, multiply_add_integers<Integers>}};
}
