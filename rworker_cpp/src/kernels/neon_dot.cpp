#include "kernels/attend.hpp"
#include "kernels/lanes_neon_dot.hpp"

namespace rworker {
constexpr Refinement kNeonDot{"neon_dot", {nullptr, nullptr, nullptr, nullptr, attend<NeonDot, DType::int4>}};
}
