#include "kernels/attend_amx.hpp"

namespace rworker {
constexpr Refinement kAvx512Amx{"avx512_amx", {nullptr, nullptr, attend_tiles<BfloatTiles>}, release_tiles};
}
