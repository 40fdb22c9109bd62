#include "kernels/lanes_scalar.hpp"
#include "kernels/table.hpp"

namespace rworker {
constexpr Kernels kScalarKernels = make_kernels<Scalar>("scalar");
}
