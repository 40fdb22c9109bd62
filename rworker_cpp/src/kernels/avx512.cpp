#include "kernels/lanes_avx512.hpp"
#include "kernels/table.hpp"

namespace rworker {
constexpr Kernels kAvx512Kernels = make_kernels<Avx512>("avx512");
}
