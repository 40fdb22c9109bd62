#include "kernels/attend.hpp"
#include "kernels/lanes_avx512_bf16.hpp"
#include "kernels/score.hpp"

namespace rworker {
constexpr Refinement kAvx512Bf16{"avx512_bf16",
                                 {nullptr, nullptr, attend<Avx512Bf16, DType::bfloat16>},
                                 nullptr,
                                 {nullptr, nullptr, score<Avx512Bf16, DType::bfloat16>}};
}
