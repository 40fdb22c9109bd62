// One token of one KV head as plain bytes, whatever the layout makes of it.
#pragma once

#include <cstdint>

#include "rworker/types.hpp"

namespace rworker {

/// The tiles a token lies in, and which of their tokens it is.
struct TokenPlace {
    std::uint8_t *key_tile, *value_tile;
    std::int64_t token;
};

/// Reads and writes stored bits, dim by dim, without rounding. All that a KV dtype must say to be exported and
/// imported; one with scales would put a token's own behind its elements.
class TokenCodec {
  public:
    TokenCodec(DType dtype, const LayerSpec& layer) : dtype_(dtype), layer_(layer) {}

    std::int64_t key_bytes() const { return layer_.key_dim * item_bytes(dtype_); }
    std::int64_t value_bytes() const { return layer_.value_dim * item_bytes(dtype_); }
    /// Of all KV heads of the layer.
    std::int64_t token_bytes() const { return layer_.num_kv_heads * (key_bytes() + value_bytes()); }

    void read_key(const TokenPlace& place, std::uint8_t* out) const;
    void read_value(const TokenPlace& place, std::uint8_t* out) const;
    /// Padding stays as it is: zeros, in a block that was cleared.
    void write_key(const TokenPlace& place, const std::uint8_t* data) const;
    void write_value(const TokenPlace& place, const std::uint8_t* data) const;

  private:
    DType dtype_;
    const LayerSpec& layer_;
};

}  // namespace rworker
