#include "kernels/tile_softmax.hpp"
// tile_softmax.hpp defines exp2_nonpositive, which attend_bytes.hpp needs
#include "kernels/attend_bytes.hpp"
#include "kernels/lanes_avx512_vnni.hpp"

namespace {

template <>
inline void quantize_query<Avx512VnniBytes, DType::int8>(float* row, int padded) {
    quantize_query_bytes<Avx512VnniBytes, DType::int8>(row, padded);
}

template <>
inline void quantize_query<Avx512VnniBytes, DType::int4>(float* row, int padded) {
    quantize_query_bytes<Avx512VnniBytes, DType::int4>(row, padded);
}

template <DType D>
void attend_codes(const AttendArgs& args) {
    if (!rworker::is_for_bytes(D, args.group) || args.alibi_slopes)
        return rworker::kAvx512Vnni.attend[int(D)](args);
    attend_bytes<Avx512VnniBytes, D>(args);
}

}  // namespace

namespace rworker {
constexpr Refinement kAvx512VnniBytes{
    "avx512_vnni", {nullptr, nullptr, nullptr, attend_codes<DType::int8>, attend_codes<DType::int4>}};
}
