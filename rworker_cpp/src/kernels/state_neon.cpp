#include "kernels/lanes_neon.hpp"
#include "kernels/state.hpp"

namespace rworker {
constexpr StateKernels kNeonState = make_state_kernels<Neon>();
}
