// Keys and values that prefill workers compute, on their way into the blocks that RESERVE took for them.
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

/// Where stored tokens of one layer go, as `KVCache::export_sequence` writes them; the first is the token at `start`.
struct OutgoingRows {
    std::uint8_t* bytes;
    std::int64_t start, num_rows;

    std::int64_t end() const { return start + num_rows; }
};

using AppendKernel = void (*)(const AppendArgs&);  // arrays of them are indexed by append_index

/// Tokens [begin, end) of a sequence, which come in any order and from several prefill workers at once.
///
/// Kernels append to a tile in order only. So rows are stored by whole tiles, and a tile that comes in pieces is kept
/// aside, as it came, until it is whole.
class Incoming {
  public:
    /// The blocks of the sequence's tokens 0 to `end`, and those of its state.
    Incoming(std::vector<std::int32_t> blocks, std::vector<std::int32_t> state_blocks, std::int64_t begin,
             std::int64_t end, std::int64_t num_layers);

    const std::vector<std::int32_t>& blocks() const { return blocks_; }
    const std::vector<std::int32_t>& state_blocks() const { return state_blocks_; }
    std::int64_t begin() const { return begin_; }
    std::int64_t end() const { return end_; }
    /// Rows that did not come yet, over all layers.
    std::int64_t num_missing() const { return num_missing_; }

    /// Error unless these rows belong here and none of them came before.
    void check(std::int64_t layer, std::int64_t start, std::int64_t num_rows) const;
    /// Error unless these rows are of the tokens before `begin`, which the sequence had when it was reserved.
    void check_read(std::int64_t layer, std::int64_t start, std::int64_t num_rows) const;
    /// How long the sequence is, as the tile shows in which `begin` lies: it is written once all of it has come.
    std::int64_t length_seen(std::int64_t layer) const;
    /// The tokens of a tile that are incoming: [first, second).
    std::pair<std::int64_t, std::int64_t> tokens_of(std::int64_t tile) const;
    /// These rows have come.
    void count(std::int64_t layer, std::int64_t start, std::int64_t end);

    struct Staged {
        std::vector<std::uint8_t> keys, values;  // kTileTokens rows of each
        std::int64_t num_rows = 0;
    };
    /// The rows of one tile of a layer that are kept aside.
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
