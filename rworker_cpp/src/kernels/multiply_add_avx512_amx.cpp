#include "rworker/multiply_add.hpp"

#include "kernels/tiles.hpp"

namespace {

/// Rounds of four sums in turn, with all of a tile register's 16 rows; `Lanes` multiply-adds to a lane of four bytes.
template <int Lanes, class Multiply>
float multiply_add_tiles(int64_t count, Multiply multiply) {
    alignas(64) static constexpr uint8_t zeros[kTileBytes] = {};  // the time does not depend on the numbers
    constexpr int64_t round = kSumTiles * 16 * 16 * 16 * Lanes;
    alignas(64) float sums[16 * 16];
    configure_tiles(kTileRows);
    for_each_sum<kSumTiles>([]<int I>() { clear_sum<I>(); });
    load_tile<kRowTile>(zeros, kTileLine);
    load_tile<kFirstCacheTile>(zeros, kTileLine);
    for (int64_t done = 0; done < count; done += round) for_each_sum<kSumTiles>(multiply);
    store_sum<0>(sums, kTileLine);
    release_tiles();
    return sums[0];
}

float multiply_add_bfloats(int64_t count) {
    return multiply_add_tiles<2>(count, []<int I>() { add_bfloat_products<I, kFirstCacheTile>(); });
}

float multiply_add_bytes(int64_t count) {
    return multiply_add_tiles<4>(count, []<int I>() { add_signed_products<I, kFirstCacheTile>(); });
}

}  // namespace

namespace rworker {
constexpr MultiplyAdds kAvx512AmxMultiplyAdds{"avx512_amx", {nullptr, multiply_add_bfloats, multiply_add_bytes}};
}
