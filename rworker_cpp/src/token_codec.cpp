#include "rworker/token_codec.hpp"

#include <cstring>

namespace rworker {
namespace {

/// Bytes of `dim` elements.
std::int64_t elements_bytes(DType dtype, std::int64_t dim) {
    if (dtype == DType::int4) return (dim + 1) / 2;
    return dim * (dtype == DType::int8 ? 1 : item_bytes(dtype));
}

/// `place_of` tells where a dim of the token lies.
template <class PlaceOf>
void read_row(DType dtype, const std::uint8_t* tile, std::int64_t token, std::int64_t dim, PlaceOf place_of,
              std::uint8_t* out) {
    const std::int64_t elements = elements_bytes(dtype, dim), item = dtype == DType::int4 ? 0 : elements / dim;
    if (item == 0) std::memset(out, 0, elements);
    for (std::int64_t d = 0; d < dim; ++d) {
        const ElementPlace place = place_of(d);
        if (item == 0)
            out[d / 2] |= std::uint8_t((tile[place.byte] >> place.shift & 15) << d % 2 * 4);
        else
            std::memcpy(out + d * item, tile + place.byte, item);
    }
    for (std::int64_t word = 0; word < scale_words(dtype, dim); ++word)
        std::memcpy(out + elements + word * 4, tile + scale_place(word, token), 4);
}

template <class PlaceOf>
void write_row(DType dtype, std::uint8_t* tile, std::int64_t token, std::int64_t dim, PlaceOf place_of,
               const std::uint8_t* data) {
    const std::int64_t elements = elements_bytes(dtype, dim), item = dtype == DType::int4 ? 0 : elements / dim;
    for (std::int64_t d = 0; d < dim; ++d) {
        const ElementPlace place = place_of(d);
        if (item == 0) {
            const int code = data[d / 2] >> d % 2 * 4 & 15;
            tile[place.byte] = std::uint8_t((tile[place.byte] & ~(15 << place.shift)) | code << place.shift);
        } else {
            std::memcpy(tile + place.byte, data + d * item, item);
        }
    }
    for (std::int64_t word = 0; word < scale_words(dtype, dim); ++word)
        std::memcpy(tile + scale_place(word, token), data + elements + word * 4, 4);
}

}  // namespace

std::int64_t TokenCodec::row_bytes(std::int64_t dim) const {
    return elements_bytes(dtype_, dim) + scale_words(dtype_, dim) * 4;
}

void TokenCodec::read_key(const TokenPlace& place, std::uint8_t* out) const {
    read_row(dtype_, place.key_tile, place.token, layer_.key_dim, [&](auto dim) { return key_at(place, dim); }, out);
}

void TokenCodec::read_value(const TokenPlace& place, std::uint8_t* out) const {
    read_row(dtype_, place.value_tile, place.token, layer_.value_dim, [&](auto d) { return value_at(place, d); }, out);
}

void TokenCodec::write_key(const TokenPlace& place, const std::uint8_t* data) const {
    write_row(dtype_, place.key_tile, place.token, layer_.key_dim, [&](auto dim) { return key_at(place, dim); }, data);
}

void TokenCodec::write_value(const TokenPlace& place, const std::uint8_t* data) const {
    write_row(
        dtype_, place.value_tile, place.token, layer_.value_dim, [&](auto d) { return value_at(place, d); }, data);
}

ElementPlace TokenCodec::key_at(const TokenPlace& place, std::int64_t dim) const {
    return key_place(dtype_, place.key_order, place.token, dim, layer_.key_dim);
}

ElementPlace TokenCodec::value_at(const TokenPlace& place, std::int64_t dim) const {
    return value_place(dtype_, place.token, dim, layer_.value_dim);
}

}  // namespace rworker
