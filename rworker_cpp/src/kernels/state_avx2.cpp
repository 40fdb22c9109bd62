#include "kernels/lanes_avx2.hpp"
#include "kernels/state.hpp"

namespace rworker {
constexpr StateKernels kAvx2State = make_state_kernels<Avx2>();
}
