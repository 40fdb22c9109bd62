#include "kernels/lanes_neon.hpp"
#include "kernels/table.hpp"

namespace rworker {
constexpr Kernels kNeonKernels = make_kernels<Neon>("neon");
}
