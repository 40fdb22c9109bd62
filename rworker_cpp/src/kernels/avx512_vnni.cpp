#include "kernels/attend.hpp"
#include "kernels/lanes_avx512_vnni.hpp"

namespace rworker {
constexpr Refinement kAvx512Vnni{
    "avx512_vnni", {nullptr, nullptr, nullptr, attend<Avx512Vnni, DType::int8>, attend<Avx512Vnni, DType::int4>}};
}
