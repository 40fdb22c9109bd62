#include "kernels/lanes_avx512.hpp"
#include "kernels/state.hpp"

namespace rworker {
constexpr StateKernels kAvx512State = make_state_kernels<Avx512>();
}
