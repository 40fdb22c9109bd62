#include "rworker/picks.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "kernels/transpose.hpp"

namespace rworker {
namespace {

/// Maps scores to integers of the same order, also NaN, which a peer may send. 0 and -0 are equal.
std::uint32_t rank_of(float score) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(score + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/// Packs a score and its index into one number: a larger score gives a larger number; of equal scores, the earlier
/// index does.
std::uint64_t order_of(float score, std::int64_t place) {
    return std::uint64_t(rank_of(score)) << 32 | (0xffffffffu - std::uint32_t(place));
}

std::int32_t place_of(std::uint64_t order) { return std::int32_t(0xffffffffu - std::uint32_t(order)); }

/// Ranks that are sent: 0 is none, the largest is a block that is picked whatever its score is.
constexpr std::uint32_t kLeastRank = 1, kLocalRank = 0xffffffffu;

/// The `most` best of `count` scores, `score_at(i)`, as integers in any order; all if there are no more.
template <class ScoreAt>
std::vector<std::uint64_t>& best_of(std::int64_t count, std::int64_t most, ScoreAt score_at) {
    // Whenever twice as many as needed are kept, the worse half is dropped. Scores below the kept ones are then
    // skipped.
    static thread_local std::vector<std::uint64_t> best;
    best.clear();
    if (most == 0) return best;
    best.reserve(2 * most);
    std::uint32_t least = 0;
    const auto drop_worse = [&] {
        std::nth_element(best.begin(), best.begin() + (most - 1), best.end(), std::greater<>());
        best.resize(most);
        least = std::uint32_t(best[most - 1] >> 32);
    };
    for (std::int64_t i = 0; i < count; ++i) {
        const float score = score_at(i);
        if (rank_of(score) < least) continue;
        best.push_back(order_of(score, i));
        if (std::int64_t(best.size()) == 2 * most) drop_worse();
    }
    if (std::int64_t(best.size()) > most) drop_worse();
    return best;
}

/// The indexes of the `most` best of `count` scores, ascending.
template <class ScoreAt>
void pick_best(std::int64_t count, std::int64_t most, ScoreAt score_at, std::int32_t* picked) {
    if (count <= most) {
        for (std::int64_t i = 0; i < count; ++i) picked[i] = std::int32_t(i);
        return;
    }
    const std::vector<std::uint64_t>& best = best_of(count, most, score_at);
    std::transform(best.begin(), best.end(), picked, place_of);
    std::sort(picked, picked + most);
}

/// The same indexes, best first, and their ranks; returns their number.
template <class ScoreAt>
std::int64_t rank_best(std::int64_t count, std::int64_t most, ScoreAt score_at, std::int32_t* picked,
                       std::uint32_t* ranks) {
    std::vector<std::uint64_t>& best = best_of(count, most, score_at);
    std::sort(best.begin(), best.end(), std::greater<>());
    for (std::size_t i = 0; i < best.size(); ++i) {
        picked[i] = place_of(best[i]);
        ranks[i] = std::clamp(std::uint32_t(best[i] >> 32), kLeastRank, kLocalRank - 1);
    }
    return std::int64_t(best.size());
}

/// out[line][token] = rows[token][line] of a tile's rows of `lines` words.
template <class Word>
void rows_to_tile(const std::uint8_t* const* rows, std::int64_t lines, std::uint8_t* tile) {
    Word* const out = reinterpret_cast<Word*>(tile);
    for (std::int64_t token = 0; token < kTileTokens; token += 4) {
        const Word* row[4];
        for (int i = 0; i < 4; ++i) row[i] = reinterpret_cast<const Word*>(rows[token + i]);
        std::int64_t line = 0;
        for (; line + 4 <= lines; line += 4) {
            const Word* const square[4] = {row[0] + line, row[1] + line, row[2] + line, row[3] + line};
            transpose_square(square, out + line * kTileTokens + token);
        }
        for (; line < lines; ++line)
            for (int i = 0; i < 4; ++i) out[line * kTileTokens + token + i] = row[i][line];
    }
}

}  // namespace

PickedTokens::PickedTokens(const Index& index, std::int64_t position, std::int64_t end)
    : PickedTokens(index, position, end,
                   std::min(index.picks, index.block == 0 ? position + 1 : position / index.block + 1)) {}

PickedTokens::PickedTokens(const Index& index, std::int64_t position, std::int64_t end, std::int64_t count)
    : seen(count), stored(count) {
    if (index.block == 0 || count == 0) return;
    const std::int64_t first = position / index.block * index.block;
    const std::int64_t before = (count - 1) * index.block;
    seen = before + position + 1 - first;
    stored = before + std::min(end - first, index.block);
}

void share_picks(std::span<const std::uint32_t* const> parts, std::int64_t most, std::span<std::int32_t> counts) {
    const auto count_down_to = [&](std::uint32_t rank) {
        std::int64_t total = 0;
        for (std::size_t i = 0; i < parts.size(); ++i) {
            counts[i] = std::int32_t(std::partition_point(parts[i], parts[i] + most,
                                                          [&](std::uint32_t each) { return each >= rank; }) - parts[i]);
            total += counts[i];
        }
        return total;
    };
    if (count_down_to(kLeastRank) <= most) return;
    std::uint32_t least = kLeastRank, above = kLocalRank;  // this many equal `least` are picked: too few exceed it
    while (least < above) {
        const std::uint32_t middle = least + (above - least + 1) / 2;
        if (count_down_to(middle) >= most)
            least = middle;
        else
            above = middle - 1;
    }
    std::int64_t left = most - (least == kLocalRank ? (std::fill(counts.begin(), counts.end(), 0), 0)
                                                    : count_down_to(least + 1));
    for (std::size_t i = 0; i < parts.size(); ++i)
        for (; left > 0 && counts[i] < most && parts[i][counts[i]] == least; --left) ++counts[i];
}

void Picks::reset(std::int64_t layer, const LayerSpec& spec, std::int64_t num_queries, std::int64_t longest) {
    index_ = spec.index(), layer_ = layer, block_ = index_->block, local_ = index_->local;
    most_ = std::min(index_->picks, block_ == 0 ? longest : (longest + block_ - 1) / block_);
    heads_ = block_ == 0 ? 1 : spec.num_heads;
    picked_.resize(num_queries * heads_ * most_);
    counts_.resize(num_queries * heads_);
    places_.resize(num_queries);
}

void Picks::pick(std::int64_t query, std::int64_t position, const float* scores, std::int64_t stride) {
    std::int32_t* picked = picked_.data() + query * heads_ * most_;
    if (block_ == 0) {
        pick_best(position + 1, most_, [&](std::int64_t token) { return scores[token]; }, picked);
        return;
    }
    const std::int64_t in_split = kSplitTokens / block_, own = position / block_;
    for (std::int64_t head = 0; head < heads_; ++head, picked += most_) {
        const std::int64_t local = std::min(local_, own + 1), others = own + 1 - local, free = most_ - local;
        const auto score_at = [&](std::int64_t block) {
            return scores[block / in_split * stride + head * in_split + block % in_split];
        };
        pick_best(others, free, score_at, picked);
        for (std::int64_t i = 0; i < local; ++i) picked[std::min(others, free) + i] = std::int32_t(others + i);
    }
}

void Picks::rank(std::int64_t query, std::int64_t position, std::int64_t end, const float* scores, std::int64_t stride,
                 std::uint32_t* ranks) {
    const std::int64_t last = std::min(position, end - 1);
    places_[query] = {last, end};
    std::int32_t *picked = picked_.data() + query * heads_ * most_, *counts = counts_.data() + query * heads_;
    if (block_ == 0) {
        counts[0] = std::int32_t(
            rank_best(last + 1, most_, [&](std::int64_t token) { return scores[token]; }, picked, ranks));
        return;
    }
    const std::int64_t in_split = kSplitTokens / block_, blocks = last / block_ + 1;
    const std::int64_t others = std::clamp<std::int64_t>(position / block_ + 1 - local_, 0, blocks);
    const std::int64_t local = blocks - others;
    for (std::int64_t head = 0; head < heads_; ++head, picked += most_, ranks += index_->picks) {
        const auto score_at = [&](std::int64_t block) {
            return scores[block / in_split * stride + head * in_split + block % in_split];
        };
        for (std::int64_t i = 0; i < local; ++i) picked[i] = std::int32_t(others + i), ranks[i] = kLocalRank;
        counts[head] =
            std::int32_t(local + rank_best(others, most_ - local, score_at, picked + local, ranks + local));
    }
}

bool Picks::fits(std::int64_t query, const std::int32_t* counts) const {
    for (std::int64_t head = 0; head < heads_; ++head)
        if (counts[head] < 0 || counts[head] > counts_[query * heads_ + head]) return false;
    return true;
}

void Picks::share(std::int64_t query, const std::int32_t* counts) {
    for (std::int64_t head = 0; head < heads_; ++head) {
        std::int32_t* const picked = picked_.data() + (query * heads_ + head) * most_;
        std::sort(picked, picked + counts[head]);
        counts_[query * heads_ + head] = counts[head];
    }
}

PickedTokens Picks::shared(std::int64_t query, std::int64_t head) const {
    return {*index_, places_[query].position, places_[query].end, counts_[query * heads_ + head]};
}

PickedRows::PickedRows(const KVCache& cache) : blocks_(1) {
    std::int64_t bytes = 0;
    for (std::size_t i = 0; i < cache.layers().size(); ++i)
        if (cache.layers()[i].keeps_rows())
            bytes = std::max(bytes, kSplitTokens / kTileTokens * cache.layout(std::int64_t(i)).key_tile_bytes + 64);
    keys_.resize(bytes);
}

HeadView PickedRows::gather(const HeadView& view, const LayerSpec& layer, DType dtype, const std::int32_t* picks,
                            std::int64_t begin, std::int64_t end) {
    const bool has_codes = has_latent_codes(layer, dtype);
    const std::int64_t pack = dtype == DType::bfloat16 ? 2 : 1, lines = (layer.key_dim + pack - 1) / pack;
    const std::int64_t row_bytes = has_codes ? view.key_tile_bytes / kTileTokens : lines * pack * item_bytes(dtype);
    const std::int64_t within_block = (std::int64_t(1) << view.log2_tiles_per_block) - 1;
    std::uint8_t* const memory = keys_.data() + (64 - reinterpret_cast<std::uintptr_t>(keys_.data()) % 64) % 64;
    const auto row_of = [&](std::int64_t position) {
        const std::int64_t tile = position / kTileTokens;
        return view.base + view.blocks[tile >> view.log2_tiles_per_block] * view.block_stride_bytes +
               (tile & within_block) * view.key_tile_bytes + position % kTileTokens * row_bytes;
    };
    for (std::int64_t first = begin; first < end; first += kTileTokens) {
        std::uint8_t* const tile = memory + (first - begin) / kTileTokens * view.key_tile_bytes;
        const std::uint8_t* rows[kTileTokens];
        const std::int64_t count = std::min<std::int64_t>(end - first, kTileTokens);
        for (std::int64_t i = 0; i < count; ++i) rows[i] = row_of(picks[first + i]);
        for (std::int64_t i = first + count; i < std::min(first + count + kTileTokens, end); ++i)
            for (std::int64_t byte = 0; byte < row_bytes; byte += 64) __builtin_prefetch(row_of(picks[i]) + byte);
        if (count < kTileTokens || has_codes)
            for (std::int64_t i = 0; i < count; ++i) std::memcpy(tile + i * row_bytes, rows[i], row_bytes);
        else if (pack * item_bytes(dtype) == 4)
            rows_to_tile<std::uint32_t>(rows, lines, tile);
        else
            rows_to_tile<std::uint16_t>(rows, lines, tile);
    }
    const int log2_tiles = std::countr_zero(std::uint64_t(kSplitTokens / kTileTokens));
    blocks_.assign(begin / kSplitTokens + 1, 0);
    HeadView gathered{memory, blocks_.data(), view.block_stride_bytes, 0, view.key_tile_bytes, view.value_tile_bytes,
                      log2_tiles};
    gathered.split_values = view.split_values;
    return gathered;
}

HeadView PickedRows::table(const HeadView& view, std::int64_t pick_block, std::int64_t block_size,
                           const std::int32_t* picks, std::int64_t begin, std::int64_t end, bool next) {
    const std::int64_t parts = pick_block / block_size;
    std::vector<std::int32_t>& blocks = next ? next_blocks_ : blocks_;
    blocks.resize((end + block_size - 1) / block_size);
    for (std::int64_t i = begin / block_size; i < std::int64_t(blocks.size()); ++i)
        blocks[i] = view.blocks[picks[i / parts] * parts + i % parts];
    HeadView picked = view;
    picked.blocks = blocks.data();
    return picked;
}

}  // namespace rworker
