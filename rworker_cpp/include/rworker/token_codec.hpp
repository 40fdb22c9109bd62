// One token of one KV head as plain bytes, independent of the layout.
#pragma once

#include <cstdint>

#include "rworker/layout.hpp"

namespace rworker {

/// The tiles that a token lies in, and its index there.
struct TokenPlace {
    std::uint8_t *key_tile, *value_tile;
    KeyOrder key_order;
    std::int64_t token;
};

/// Reads and writes stored bits unchanged: the elements of a head's key or value (two int4 codes per byte, the lower
/// dim in the low bits), then its scales, then a key's fifth bits or a latent's further dims.
class TokenCodec {
  public:
    TokenCodec(DType dtype, const LayerSpec& layer)
        : dtype_(dtype_of(layer, dtype)), layer_(layer), is_row_(has_latent_codes(layer, dtype)) {}

    std::int64_t key_bytes() const;
    std::int64_t value_bytes() const;
    /// Bytes of all KV heads of the layer.
    std::int64_t token_bytes() const { return layer_.num_kv_heads * (key_bytes() + value_bytes()); }

    void read_key(const TokenPlace& place, std::uint8_t* out) const;
    void read_value(const TokenPlace& place, std::uint8_t* out) const;
    /// It does not write padding, which is zeros in a cleared block.
    void write_key(const TokenPlace& place, const std::uint8_t* data) const;
    void write_value(const TokenPlace& place, const std::uint8_t* data) const;

  private:
    DType dtype_;
    const LayerSpec& layer_;
    bool is_row_;  // latent codes, which are stored in this form
};

}  // namespace rworker
