#include "rworker/layout.hpp"

#include <bit>
#include <cstring>
#include <vector>

namespace rworker {
namespace {

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

template <class Word>
Word load_word(const std::uint8_t* data) {
    Word word;
    std::memcpy(&word, data, sizeof(word));
    return word;
}

float half_to_float(std::uint16_t bits) {
    const std::uint32_t sign = std::uint32_t(bits & 0x8000) << 16;
    const std::uint32_t magnitude = bits & 0x7fff;
    if (magnitude >= 0x7c00) return std::bit_cast<float>(sign | 0x7f800000u | magnitude << 13);
    // After the shift, the exponent is 112 too small. A multiplication corrects it, for subnormals too.
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude << 13) * 0x1p112f) | sign);
}

float bfloat_to_float(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t(bits) << 16); }

/// Neighbours (dims of keys, tokens of values) in one lane of a line.
std::int64_t pack_of(DType dtype) {
    return dtype == DType::int4 ? 8 : dtype == DType::int8 ? 4 : dtype == DType::bfloat16 ? 2 : 1;
}

std::int64_t bits_of(DType dtype) {
    return dtype == DType::int4 ? 4 : dtype == DType::int8 ? 8 : 8 * item_bytes(dtype);
}

std::int64_t scale_bytes(DType dtype, std::int64_t dim) { return 4 * scale_words(dtype, dim); }

std::int64_t lane_bytes(DType dtype) { return pack_of(dtype) * bits_of(dtype) / 8; }

/// `fifth`: the fifth bit of an int4 code, in its position.
float load_element(DType dtype, const std::uint8_t* tile, const RowPlace& row, std::int64_t token, std::int64_t dim,
                   int fifth) {
    const std::int64_t run_byte = dim % row.run * bits_of(dtype) / 8;
    const std::uint8_t* data = tile + row.first_byte + dim / row.run * row.stride_bytes + run_byte;
    if (dtype == DType::float32) return load_word<float>(data);
    if (dtype == DType::float16) return half_to_float(load_word<std::uint16_t>(data));
    if (dtype == DType::bfloat16) return bfloat_to_float(load_word<std::uint16_t>(data));
    if (dtype == DType::int8) return load_word<float>(tile + scale_place(0, token)) * float(int(*data) - 128);
    const std::uint8_t* terms = tile + scale_place(dim / kGroupDims, token);
    const float scale = bfloat_to_float(load_word<std::uint16_t>(terms));
    const float zero = bfloat_to_float(load_word<std::uint16_t>(terms + 2));
    const CodePlace code = code_place(row, dim);
    return zero + scale * float((tile[code.byte] >> code.shift & 15) | fifth);
}

}  // namespace

DType parse_model_dtype(const std::string& name) {
    if (name == "float32") return DType::float32;
    if (name == "float16") return DType::float16;
    if (name == "bfloat16") return DType::bfloat16;
    throw Error("model_dtype is '" + name + "'; it must be float32, float16 or bfloat16");
}

DType parse_kv_dtype(const std::string& name) {
    if (name == "int8") return DType::int8;
    if (name == "int4") return DType::int4;
    if (name == "float32" || name == "float16" || name == "bfloat16") return parse_model_dtype(name);
    throw Error("kv_dtype is '" + name + "'; it must be float32, float16, bfloat16, int8 or int4");
}

std::int64_t token_bytes(const LayerSpec& layer, DType cache_dtype) {
    const DType kv_dtype = dtype_of(layer, cache_dtype);
    const std::int64_t bits = bits_of(kv_dtype);
    if (has_latent_codes(layer, kv_dtype))
        return (layer.value_dim * bits + 7) / 8 + scale_bytes(kv_dtype, layer.value_dim) +
               2 * (layer.key_dim - layer.value_dim);
    const std::int64_t keys = (layer.key_dim * bits + 7) / 8 + 4 * key_words(kv_dtype, layer.key_dim);
    if (layer.values_in_keys()) return keys;
    return keys + (layer.value_dim * bits + 7) / 8 + scale_bytes(kv_dtype, layer.value_dim);
}

LayerLayout::LayerLayout(const LayerSpec& layer, DType cache_dtype, std::int64_t block_size, std::int64_t region_offset)
    : region_offset_bytes(region_offset) {
    const DType kv_dtype = dtype_of(layer, cache_dtype);
    const std::int64_t key_dim = round_up(layer.key_dim, pack_of(kv_dtype)), value_dim = round_up(layer.value_dim, 16);
    key_tile_bytes = kTileTokens * (4 * key_words(kv_dtype, key_dim) + key_dim * bits_of(kv_dtype) / 8);
    if (has_latent_codes(layer, kv_dtype)) key_tile_bytes = kTileTokens * token_bytes(layer, kv_dtype);
    value_tile_bytes = kTileTokens * (scale_bytes(kv_dtype, value_dim) + value_dim * bits_of(kv_dtype) / 8);
    const std::int64_t tiles = block_size / kTileTokens;
    const std::int64_t keys_bytes = round_up(tiles * key_tile_bytes, 64);
    values_offset_bytes = layer.values_in_keys() ? 0 : keys_bytes;
    head_bytes = keys_bytes + (layer.values_in_keys() ? 0 : round_up(tiles * value_tile_bytes, 64));
    block_bytes = layer.num_kv_heads * head_bytes;
}

std::int64_t scale_words(DType dtype, std::int64_t dim) {
    return dtype == DType::int4 ? groups_of(dim) : dtype == DType::int8 ? 1 : 0;
}

std::int64_t key_words(DType dtype, std::int64_t dim) {
    return dtype == DType::int4 ? key_words_of(dim) : scale_words(dtype, dim);
}

void turn_keys_to_rows(DType dtype, std::uint8_t* tile, std::int64_t key_dim) {
    const std::int64_t pack = pack_of(dtype), lines = (key_dim + pack - 1) / pack, word = lane_bytes(dtype);
    std::uint8_t* const keys = tile + kTileTokens * 4 * key_words(dtype, key_dim);
    const std::vector<std::uint8_t> lanes(keys, keys + lines * kTileTokens * word);
    for (std::int64_t line = 0; line < lines; ++line)
        for (std::int64_t token = 0; token < kTileTokens; ++token)
            std::memcpy(keys + (token * lines + line) * word, lanes.data() + (line * kTileTokens + token) * word, word);
}

RowPlace key_place(DType dtype, KeyOrder order, std::int64_t token, std::int64_t key_dim) {
    const std::int64_t pack = pack_of(dtype), lines = (key_dim + pack - 1) / pack, words = key_words(dtype, key_dim);
    const bool lanes = order == KeyOrder::lanes;
    return {kTileTokens * 4 * words + token * (lanes ? 1 : lines) * lane_bytes(dtype),
            (lanes ? kTileTokens : 1) * lane_bytes(dtype), pack, 0};
}

RowPlace value_place(DType dtype, std::int64_t token, std::int64_t value_dim) {
    const std::int64_t pack = pack_of(dtype), part = token % pack, scales = scale_bytes(dtype, value_dim);
    const std::int64_t lane = kTileTokens * scales + token / pack * round_up(value_dim, 16) * lane_bytes(dtype);
    if (dtype == DType::int4) return {lane + part % 4, lane_bytes(dtype), 1, int(part / 4 * 4)};
    return {lane + part * bits_of(dtype) / 8, lane_bytes(dtype), 1, 0};
}

float load_key(DType dtype, KeyOrder order, const std::uint8_t* tile, std::int64_t token, std::int64_t dim,
               std::int64_t key_dim) {
    int fifth = 0;
    if (dtype == DType::int4) {
        const std::int64_t word = scale_words(dtype, key_dim) + dim / kFifthBitDims;
        const std::uint32_t bits = load_word<std::uint32_t>(tile + scale_place(word, token));
        fifth = int(bits >> (dim % 4 * 8 + dim % kFifthBitDims / 4) & 1) << 4;
    }
    return load_element(dtype, tile, key_place(dtype, order, token, key_dim), token, dim, fifth);
}

float load_value(DType dtype, const std::uint8_t* tile, std::int64_t token, std::int64_t dim, std::int64_t value_dim) {
    return load_element(dtype, tile, value_place(dtype, token, value_dim), token, dim, 0);
}

}  // namespace rworker
