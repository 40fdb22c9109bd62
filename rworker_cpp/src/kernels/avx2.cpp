#include "kernels/lanes_avx2.hpp"
#include "kernels/table.hpp"

namespace rworker {
constexpr Kernels kAvx2Kernels = make_kernels<Avx2>("avx2");
}
