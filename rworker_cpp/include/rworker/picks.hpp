// What an index layer's queries pick, and how the layers after it read only that.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "rworker/kv_cache.hpp"

namespace rworker {

/// Tokens of a query's own order of what it reads: all it picked, one after the other. `seen`: those up to the query's
/// own; `stored`: those of its last block, too, that come after it. A query of position p picks the same count whatever
/// the scores are.
struct PickedTokens {
    std::int64_t seen, stored;

    PickedTokens(std::int64_t num_seen, std::int64_t num_stored) : seen(num_seen), stored(num_stored) {}
    /// Of a query at `position` in a sequence with `end` tokens stored.
    PickedTokens(const Index& index, std::int64_t position, std::int64_t end);
    /// The same in a range, which holds `count` of what the query picked, tokens or blocks.
    PickedTokens(const Index& index, std::int64_t position, std::int64_t end, std::int64_t count);
};

/// Ranks of an index layer's scores, as ranges answer with them: the larger the better, the best first, `most` of each
/// part, 0 where there are no more. counts[i]: how many of parts[i]'s are among the `most` best of all; of equal ones
/// those of earlier parts.
void share_picks(std::span<const std::uint32_t* const> parts, std::int64_t most, std::span<std::int32_t> counts);

/// The picks of one mini-batch's queries.
class Picks {
  public:
    /// Room for those of `num_queries` in layer `layer`, an index layer, over sequences of up to `longest` tokens.
    void reset(std::int64_t layer, const LayerSpec& index, std::int64_t num_queries, std::int64_t longest);
    void forget() { layer_ = -1; }
    /// The index layer whose picks these are; -1: none.
    std::int64_t layer() const { return layer_; }
    /// Heads that pick by themselves.
    std::int64_t heads() const { return heads_; }

    /// Pick for a query at `position` by its scores, [token] or [split][head][block] (see Kernels::score), `stride`
    /// floats from split to split. Equal scores: the earlier first.
    void pick(std::int64_t query, std::int64_t position, const float* scores, std::int64_t stride);
    /// The same in a range of `end` tokens, where `position`, counted from its first, may lie behind it: the best here,
    /// whose ranks are written as [head][picks of the index], with zeros behind them. Which of them count is told by `share`.
    void rank(std::int64_t query, std::int64_t position, std::int64_t end, const float* scores, std::int64_t stride,
              std::uint32_t* ranks);
    /// Of such a query, counts [head]: the best so many are picked. False, and nothing has changed, for impossible ones.
    bool fits(std::int64_t query, const std::int32_t* counts) const;
    void share(std::int64_t query, const std::int32_t* counts);
    /// What such a query, or one of its heads, reads in this range.
    PickedTokens shared(std::int64_t query, std::int64_t head) const;
    /// What a query, or one of its heads, picked, ascending: positions of tokens, or numbers of blocks.
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
    std::vector<std::int32_t> counts_;  // [query][head], of ranges: the best that are there, then those that count
    std::vector<Place> places_;         // [query], of ranges
};

/// The rows of single tokens side by side, in tiles as the kernels read them, for one split of what was picked.
class PickedRows {
  public:
    /// Room for a split of the cache's layers that read single tokens.
    explicit PickedRows(const KVCache& cache);

    /// A view of tokens [begin, end) of what `picks` are, copied from `view`; begin is a split's first.
    HeadView gather(const HeadView& view, const LayerSpec& layer, DType dtype, const std::int32_t* picks,
                    std::int64_t begin, std::int64_t end);
    /// The same of blocks, which are read where they lie; and, as `next`, of those that are read after them.
    HeadView table(const HeadView& view, std::int64_t pick_block, std::int64_t block_size, const std::int32_t* picks,
                   std::int64_t begin, std::int64_t end, bool next = false);

  private:
    std::vector<std::uint8_t> keys_;
    std::vector<std::int32_t> blocks_, next_blocks_;
};

}  // namespace rworker
