#include "kernels/attend_bytes.hpp"
#include "kernels/lanes_avx512_vnni.hpp"

namespace {

template <>
inline void quantize_query<Avx512VnniBytes, DType::int8>(float* row, int padded) {
    quantize_query_bytes<Avx512VnniBytes>(row, padded);
}

void attend_int8(const AttendArgs& args) {
    if (args.group < rworker::kLeastByteGroup || args.alibi_slopes)
        return rworker::kAvx512Vnni.attend[int(DType::int8)](args);
    attend_bytes<Avx512VnniBytes>(args);
}

}  // namespace

namespace rworker {
constexpr Refinement kAvx512VnniBytes{"avx512_vnni", {nullptr, nullptr, nullptr, attend_int8}};
}
