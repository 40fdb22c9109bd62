#include "kernels/attend_amx.hpp"
#include "kernels/attend_amx_codes.hpp"

namespace rworker {
constexpr Refinement kAvx512Amx{"avx512_amx",
                                {nullptr, nullptr, attend_tiles<BfloatTiles>, attend_tiles<CodeTiles<DType::int8>>,
                                 attend_tiles<CodeTiles<DType::int4>>},
                                release_tiles};
}
