// What the queries of an index layer pick, and how the following layers read only their picks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "rworker/kv_cache.hpp"

namespace rworker {

/// Tokens that a query reads, in its own order: all picked ones, one after the other. `seen`: tokens up to the query's
/// own; `stored`: also the later ones of its last block. A query at position p picks the same number whatever the
/// scores are.
struct PickedTokens {
    std::int64_t seen, stored;

    PickedTokens(std::int64_t num_seen, std::int64_t num_stored) : seen(num_seen), stored(num_stored) {}
    /// For a query at `position` in a sequence with `end` stored tokens.
    PickedTokens(const Index& index, std::int64_t position, std::int64_t end);
    /// For a range of a sequence. It holds `count` of the query's picks, which are tokens or blocks.
    PickedTokens(const Index& index, std::int64_t position, std::int64_t end, std::int64_t count);
};

/// Chooses among the ranks of an index layer's scores that several ranges return. A larger rank is better; each part
/// has its best first, `most` in all, and then zeros. counts[i] becomes the number of ranks of parts[i] that are among
/// the `most` best of all. Of equal ranks, those of earlier parts win.
void share_picks(std::span<const std::uint32_t* const> parts, std::int64_t most, std::span<std::int32_t> counts);

/// The picks of one mini-batch's queries.
class Picks {
  public:
    /// Makes room for the picks of `num_queries` in the index layer `layer`, over sequences of up to `longest` tokens.
    void reset(std::int64_t layer, const LayerSpec& index, std::int64_t num_queries, std::int64_t longest);
    void forget() { layer_ = -1; }
    /// The index layer that these picks belong to; -1: none.
    std::int64_t layer() const { return layer_; }
    /// Heads that pick separately.
    std::int64_t heads() const { return heads_; }

    /// Picks for a query at `position` by its scores, [token] or [split][head][block] (see Kernels::score), `stride`
    /// floats from split to split. Of equal scores, the earlier one is picked.
    void pick(std::int64_t query, std::int64_t position, const float* scores, std::int64_t stride);
    /// Ranks the scores in a range of `end` tokens. `position`, counted from the range's first token, may lie after the
    /// range. It writes the ranks of the range's best scores as [head][picks of the index], then zeros. `share` later
    /// says how many of them are picked.
    void rank(std::int64_t query, std::int64_t position, std::int64_t end, const float* scores, std::int64_t stride,
              std::uint32_t* ranks);
    /// `share` sets how many of a ranked query's best scores in this range are picked: counts [head]. `fits` returns
    /// false for impossible counts.
    bool fits(std::int64_t query, const std::int32_t* counts) const;
    void share(std::int64_t query, const std::int32_t* counts);
    /// Returns the tokens that a ranked query, or one of its heads, reads in this range.
    PickedTokens shared(std::int64_t query, std::int64_t head) const;
    /// The picks of a query, or of one of its heads, ascending: positions of tokens, or numbers of blocks.
    const std::int32_t* of(std::int64_t query, std::int64_t head) const {
        return picked_.data() + (query * heads_ + head) * most_;
    }

  private:
    struct Place {
        std::int64_t position, end;
    };

    const Index* index_ = nullptr;
    std::int64_t layer_ = -1, heads_ = 0, most_ = 0, block_ = 0, local_ = 0;
    std::vector<std::int32_t> picked_;  // [query][head][most]
    std::vector<std::int32_t> counts_;  // [query][head], in ranges: first the number of ranks, then the number of picks
    std::vector<Place> places_;         // [query], in ranges
};

/// Copies the rows of single tokens into tiles that the kernels can read, for one split of the picks.
class PickedRows {
  public:
    /// Allocates room for one split, for the cache's layers that read single tokens.
    explicit PickedRows(const KVCache& cache);

    /// Returns a view of tokens [begin, end) of `picks`, copied from `view`. `begin` is the first token of a split.
    HeadView gather(const HeadView& view, const LayerSpec& layer, DType dtype, const std::int32_t* picks,
                    std::int64_t begin, std::int64_t end);
    /// Like `gather`, for picked blocks, which are read in place. `next` gets the blocks that are read after them.
    HeadView table(const HeadView& view, std::int64_t pick_block, std::int64_t block_size, const std::int32_t* picks,
                   std::int64_t begin, std::int64_t end, bool next = false);

  private:
    std::vector<std::uint8_t> keys_;
    std::vector<std::int32_t> blocks_, next_blocks_;
};

}  // namespace rworker
