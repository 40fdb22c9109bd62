#include "rworker/token_codec.hpp"

#include <cstring>
#include <type_traits>

namespace rworker {
namespace {

/// Bytes of `dim` elements.
std::int64_t elements_bytes(DType dtype, std::int64_t dim) {
    if (dtype == DType::int4) return (dim + 1) / 2;
    return dim * (dtype == DType::int8 ? 1 : item_bytes(dtype));
}

/// Calls copy_run(byte of the tile, byte of the row, bytes) for every run of a row of `row_bytes`. A constant width
/// makes each copy one move.
template <std::int64_t kRunBytes, class CopyRun>
void for_runs(const RowPlace& place, std::int64_t row_bytes, CopyRun copy_run) {
    std::int64_t tile_byte = place.first_byte, row_byte = 0;
    for (; row_byte + kRunBytes <= row_bytes; row_byte += kRunBytes, tile_byte += place.stride_bytes)
        copy_run(tile_byte, row_byte, std::integral_constant<std::int64_t, kRunBytes>());
    if (row_byte < row_bytes) copy_run(tile_byte, row_byte, row_bytes - row_byte);
}

template <class CopyRun>
void for_runs(DType dtype, const RowPlace& place, std::int64_t row_bytes, CopyRun copy_run) {
    const std::int64_t run_bytes = place.run * (dtype == DType::int8 ? 1 : item_bytes(dtype));
    if (run_bytes == 4) return for_runs<4>(place, row_bytes, copy_run);
    if (run_bytes == 2) return for_runs<2>(place, row_bytes, copy_run);
    for_runs<1>(place, row_bytes, copy_run);
}

/// Spreads the four lowest half-bytes of x to the low halves of four bytes, and back.
std::uint32_t spread_codes(std::uint32_t x) {
    x = (x | x << 8) & 0x00ff00ff;
    return (x | x << 4) & 0x0f0f0f0f;
}

std::uint32_t gather_codes(std::uint32_t x) {
    x = (x | x >> 4) & 0x00ff00ff;
    return (x | x >> 8) & 0x0000ffff;
}

/// int4: lanes of eight codes as one word each, then one code at a time.
void read_codes(const std::uint8_t* tile, const RowPlace& place, std::int64_t dim, std::uint8_t* out) {
    std::int64_t d = 0;
    for (; place.run == 8 && d + 8 <= dim; d += 8) {
        std::uint32_t lane;
        std::memcpy(&lane, tile + place.first_byte + d / 8 * place.stride_bytes, 4);
        const std::uint32_t codes = gather_codes(lane & 0x0f0f0f0f) | gather_codes(lane >> 4 & 0x0f0f0f0f) << 16;
        std::memcpy(out + d / 2, &codes, 4);
    }
    for (; place.run == 1 && d + 2 <= dim; d += 2) {
        const std::uint8_t* const pair = tile + place.first_byte + d * place.stride_bytes;
        out[d / 2] = std::uint8_t((*pair >> place.shift & 15) | (pair[place.stride_bytes] >> place.shift & 15) << 4);
    }
    for (; d < dim; ++d) {
        const CodePlace at = code_place(place, d);
        const int kept = d % 2 == 0 ? 0 : out[d / 2];
        out[d / 2] = std::uint8_t(kept | (tile[at.byte] >> at.shift & 15) << d % 2 * 4);
    }
}

void write_codes(std::uint8_t* tile, const RowPlace& place, std::int64_t dim, const std::uint8_t* data) {
    std::int64_t d = 0;
    for (; place.run == 8 && d + 8 <= dim; d += 8) {
        std::uint32_t codes;
        std::memcpy(&codes, data + d / 2, 4);
        const std::uint32_t lane = spread_codes(codes & 0xffff) | spread_codes(codes >> 16) << 4;
        std::memcpy(tile + place.first_byte + d / 8 * place.stride_bytes, &lane, 4);
    }
    for (; d < dim; ++d) {
        const CodePlace at = code_place(place, d);
        const int code = data[d / 2] >> d % 2 * 4 & 15;
        tile[at.byte] = std::uint8_t((tile[at.byte] & ~(15 << at.shift)) | code << at.shift);
    }
}

void read_row(DType dtype, const std::uint8_t* tile, const RowPlace& place, std::int64_t token, std::int64_t dim,
              std::int64_t words, std::uint8_t* out) {
    const std::int64_t elements = elements_bytes(dtype, dim);
    if (dtype == DType::int4)
        read_codes(tile, place, dim, out);
    else
        for_runs(dtype, place, elements, [&](std::int64_t tile_byte, std::int64_t row_byte, auto bytes) {
            std::memcpy(out + row_byte, tile + tile_byte, bytes);
        });
    for (std::int64_t word = 0; word < words; ++word)
        std::memcpy(out + elements + word * 4, tile + scale_place(word, token), 4);
}

void write_row(DType dtype, std::uint8_t* tile, const RowPlace& place, std::int64_t token, std::int64_t dim,
               std::int64_t words, const std::uint8_t* data) {
    const std::int64_t elements = elements_bytes(dtype, dim);
    if (dtype == DType::int4)
        write_codes(tile, place, dim, data);
    else
        for_runs(dtype, place, elements, [&](std::int64_t tile_byte, std::int64_t row_byte, auto bytes) {
            std::memcpy(tile + tile_byte, data + row_byte, bytes);
        });
    for (std::int64_t word = 0; word < words; ++word)
        std::memcpy(tile + scale_place(word, token), data + elements + word * 4, 4);
}

}  // namespace

std::int64_t TokenCodec::key_bytes() const {
    if (is_row_) return rworker::token_bytes(layer_, dtype_);
    return elements_bytes(dtype_, layer_.key_dim) + key_words(dtype_, layer_.key_dim) * 4;
}

std::int64_t TokenCodec::value_bytes() const {
    if (layer_.values_in_keys()) return 0;
    return elements_bytes(dtype_, layer_.value_dim) + scale_words(dtype_, layer_.value_dim) * 4;
}

void TokenCodec::read_key(const TokenPlace& place, std::uint8_t* out) const {
    if (is_row_) return void(std::memcpy(out, place.key_tile + place.token * key_bytes(), key_bytes()));
    const RowPlace row = key_place(dtype_, place.key_order, place.token, layer_.key_dim);
    read_row(dtype_, place.key_tile, row, place.token, layer_.key_dim, key_words(dtype_, layer_.key_dim), out);
}

void TokenCodec::read_value(const TokenPlace& place, std::uint8_t* out) const {
    if (layer_.values_in_keys()) return;
    const RowPlace row = value_place(dtype_, place.token, layer_.value_dim);
    read_row(dtype_, place.value_tile, row, place.token, layer_.value_dim, scale_words(dtype_, layer_.value_dim), out);
}

void TokenCodec::write_key(const TokenPlace& place, const std::uint8_t* data) const {
    if (is_row_) return void(std::memcpy(place.key_tile + place.token * key_bytes(), data, key_bytes()));
    const RowPlace row = key_place(dtype_, place.key_order, place.token, layer_.key_dim);
    write_row(dtype_, place.key_tile, row, place.token, layer_.key_dim, key_words(dtype_, layer_.key_dim), data);
}

void TokenCodec::write_value(const TokenPlace& place, const std::uint8_t* data) const {
    if (layer_.values_in_keys()) return;
    const RowPlace row = value_place(dtype_, place.token, layer_.value_dim);
    write_row(dtype_, place.value_tile, row, place.token, layer_.value_dim, scale_words(dtype_, layer_.value_dim),
              data);
}

}  // namespace rworker
