#include "kernels/lanes_scalar.hpp"
#include "kernels/state.hpp"

namespace rworker {
constexpr StateKernels kScalarState = make_state_kernels<Scalar>();
}
