// Keys and values from prefill workers, and their way into the blocks that RESERVE took for them.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "rworker/kernels.hpp"

namespace rworker {

/// Rows of one layer, in the model's dtype: keys [num_rows, num_kv_heads, key_dim], values [num_rows, num_kv_heads,
/// value_dim]; the first is the token at `start`.
struct IncomingRows {
    const void *keys, *values;
    std::int64_t start, num_rows;
    DType dtype;

    std::int64_t end() const { return start + num_rows; }
};

/// Where stored tokens of one layer go, in the form that `KVCache::export_sequence` writes; the first token is at
/// `start`.
struct OutgoingRows {
    std::uint8_t* bytes;
    std::int64_t start, num_rows;

    std::int64_t end() const { return start + num_rows; }
};

using AppendKernel = void (*)(const AppendArgs&);  // arrays of them are indexed by append_index

/// Tokens [begin, end) of a sequence, which arrive in any order and from several prefill workers at once.
///
/// Kernels append to a tile only in order. So whole tiles of rows are stored at once, and an incomplete tile is kept
/// aside until all its rows have arrived.
class Incoming {
  public:
    /// The blocks of the sequence's tokens 0 to `end`, and the blocks of its state.
    Incoming(std::vector<std::int32_t> blocks, std::vector<std::int32_t> state_blocks, std::int64_t begin,
             std::int64_t end, std::int64_t num_layers);

    const std::vector<std::int32_t>& blocks() const { return blocks_; }
    const std::vector<std::int32_t>& state_blocks() const { return state_blocks_; }
    std::int64_t begin() const { return begin_; }
    std::int64_t end() const { return end_; }
    /// Number of rows that have not arrived yet, over all layers.
    std::int64_t num_missing() const { return num_missing_; }

    /// Throws Error unless these rows belong here and none of them arrived before.
    void check(std::int64_t layer, std::int64_t start, std::int64_t num_rows) const;
    /// Throws Error unless these rows belong to tokens before `begin`, which the sequence had when it was reserved.
    void check_read(std::int64_t layer, std::int64_t start, std::int64_t num_rows) const;
    /// Returns `end` once all rows of the tile that contains `begin` have arrived, since that tile is then written for
    /// the whole sequence; until then `begin`.
    std::int64_t length_seen(std::int64_t layer) const;
    /// The incoming tokens of a tile: [first, second).
    std::pair<std::int64_t, std::int64_t> tokens_of(std::int64_t tile) const;
    /// Marks these rows as arrived.
    void count(std::int64_t layer, std::int64_t start, std::int64_t end);

    struct Staged {
        std::vector<std::uint8_t> keys, values;  // kTileTokens rows of each
        std::int64_t num_rows = 0;
    };
    /// The rows of one incomplete tile of a layer.
    Staged& staged(std::int64_t layer, std::int64_t tile);
    void drop_staged(std::int64_t layer, std::int64_t tile);

  private:
    std::int64_t num_tiles() const;
    std::uint16_t& arrived(std::int64_t layer, std::int64_t tile);
    std::int64_t key_of(std::int64_t layer, std::int64_t tile) const { return layer * num_tiles() + tile; }

    std::vector<std::int32_t> blocks_, state_blocks_;
    std::int64_t begin_, end_, num_layers_, num_missing_;
    std::vector<std::uint16_t> arrived_;  // [layer][tile]: a bit for each of its tokens
    std::unordered_map<std::int64_t, Staged> staged_;
};

}  // namespace rworker
