#include "rworker/layout.hpp"

#include <bit>
#include <cstring>

namespace rworker {
namespace {

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

float half_to_float(std::uint16_t bits) {
    const std::uint32_t sign = std::uint32_t(bits & 0x8000) << 16;
    const std::uint32_t magnitude = bits & 0x7fff;
    if (magnitude >= 0x7c00) return std::bit_cast<float>(sign | 0x7f800000u | magnitude << 13);
    // Shifted into place the exponent is 112 too small; a multiplication mends it, subnormals included.
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude << 13) * 0x1p112f) | sign);
}

}  // namespace

DType parse_dtype(const std::string& name, const char* argument) {
    if (name == "float32") return DType::float32;
    if (name == "float16") return DType::float16;
    if (name == "bfloat16") return DType::bfloat16;
    throw Error(std::string(argument) + " is '" + name + "'; it must be float32, float16 or bfloat16");
}

LayerLayout::LayerLayout(const LayerSpec& layer, DType kv_dtype, std::int64_t block_size, std::int64_t region_offset)
    : region_offset_bytes(region_offset) {
    const std::int64_t key_dim = kv_dtype == DType::bfloat16 ? round_up(layer.key_dim, 2) : layer.key_dim;
    key_tile_bytes = kTileTokens * key_dim * item_bytes(kv_dtype);
    value_tile_bytes = kTileTokens * round_up(layer.value_dim, 16) * item_bytes(kv_dtype);
    const std::int64_t tiles = block_size / kTileTokens;
    values_offset_bytes = round_up(tiles * key_tile_bytes, 64);
    head_bytes = values_offset_bytes + round_up(tiles * value_tile_bytes, 64);
    block_bytes = layer.num_kv_heads * head_bytes;
}

std::int64_t key_index(DType dtype, std::int64_t token, std::int64_t dim) {
    if (dtype == DType::bfloat16) return (dim / 2 * kTileTokens + token) * 2 + dim % 2;
    return dim * kTileTokens + token;
}

std::int64_t value_index(DType dtype, std::int64_t token, std::int64_t dim, std::int64_t value_dim) {
    const std::int64_t padded = round_up(value_dim, 16);
    if (dtype == DType::bfloat16) return (token / 2 * padded + dim) * 2 + token % 2;
    return token * padded + dim;
}

float load_element(DType dtype, const std::uint8_t* data, std::int64_t index) {
    if (dtype == DType::float32) {
        float value;
        std::memcpy(&value, data + index * 4, 4);
        return value;
    }
    std::uint16_t bits;
    std::memcpy(&bits, data + index * 2, 2);
    return dtype == DType::float16 ? half_to_float(bits) : std::bit_cast<float>(std::uint32_t(bits) << 16);
}

}  // namespace rworker
