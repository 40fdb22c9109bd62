#include "rworker/token_codec.hpp"

#include <cstring>

#include "rworker/layout.hpp"

namespace rworker {

void TokenCodec::read_key(const TokenPlace& place, std::uint8_t* out) const {
    const std::int64_t item = item_bytes(dtype_);
    for (std::int64_t dim = 0; dim < layer_.key_dim; ++dim)
        std::memcpy(out + dim * item, place.key_tile + key_index(dtype_, place.token, dim) * item, item);
}

void TokenCodec::read_value(const TokenPlace& place, std::uint8_t* out) const {
    const std::int64_t item = item_bytes(dtype_);
    for (std::int64_t dim = 0; dim < layer_.value_dim; ++dim) {
        const std::int64_t index = value_index(dtype_, place.token, dim, layer_.value_dim);
        std::memcpy(out + dim * item, place.value_tile + index * item, item);
    }
}

void TokenCodec::write_key(const TokenPlace& place, const std::uint8_t* data) const {
    const std::int64_t item = item_bytes(dtype_);
    for (std::int64_t dim = 0; dim < layer_.key_dim; ++dim)
        std::memcpy(place.key_tile + key_index(dtype_, place.token, dim) * item, data + dim * item, item);
}

void TokenCodec::write_value(const TokenPlace& place, const std::uint8_t* data) const {
    const std::int64_t item = item_bytes(dtype_);
    for (std::int64_t dim = 0; dim < layer_.value_dim; ++dim) {
        const std::int64_t index = value_index(dtype_, place.token, dim, layer_.value_dim);
        std::memcpy(place.value_tile + index * item, data + dim * item, item);
    }
}

}  // namespace rworker
