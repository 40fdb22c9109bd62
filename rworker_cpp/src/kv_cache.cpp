#include "rworker/kv_cache.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <utility>

namespace rworker {
namespace {

/// Floats of a row of the states; 0 where no layer has one.
std::int64_t state_row_floats(const std::vector<LayerSpec>& layers) {
    std::int64_t floats = 0;
    for (const LayerSpec& layer : layers)
        if (layer.state()) floats = std::max(floats, StatePlaces::row_floats(*layer.state()));
    return floats;
}

std::vector<LayerLayout> place_layers(const std::vector<LayerSpec>& layers, DType dtype, std::int64_t block_size,
                                      std::int64_t num_blocks) {
    require(!layers.empty(), "layers is empty; a block needs at least one");
    std::vector<LayerLayout> layouts;
    std::int64_t offset = 0;
    for (const LayerSpec& layer : layers) {
        layouts.emplace_back(layer, dtype, block_size, offset);
        offset += layouts.back().block_bytes * num_blocks;
    }
    if (offset == 0)  // tokens take no room
        layouts.front().block_bytes = std::min(block_size, kMostBlockRows) * 4 * state_row_floats(layers);
    return layouts;
}

std::int64_t sum_block_bytes(const std::vector<LayerLayout>& layouts) {
    std::int64_t bytes = 0;
    for (const LayerLayout& layout : layouts) bytes += layout.block_bytes;
    return bytes;
}

constexpr std::int64_t kMostPositions = std::int64_t(1) << 40, kMostReadRows = std::int64_t(1) << 20;

}  // namespace

std::int64_t block_bytes(const std::vector<LayerSpec>& layers, DType dtype, std::int64_t block_size) {
    return sum_block_bytes(place_layers(layers, dtype, block_size, 1));
}

std::int64_t state_blocks(const std::vector<LayerSpec>& layers, DType dtype, std::int64_t block_size) {
    return StatePlaces(layers, place_layers(layers, dtype, block_size, 1)).num_blocks();
}

KVCache::KVCache(std::vector<LayerSpec> layers, DType dtype, std::int64_t block_size, std::int64_t num_blocks)
    : layers_(std::move(layers)),
      dtype_(dtype),
      block_size_(block_size),
      layouts_(place_layers(layers_, dtype, block_size, num_blocks)),
      states_(layers_, layouts_),
      pool_(num_blocks),
      arena_(sum_block_bytes(layouts_) * num_blocks) {
    block_bytes_ = sum_block_bytes(layouts_);
}

void KVCache::begin_step(std::span<const Control> controls, std::span<const Span> spans) {
    before_.clear(), edits_.clear(), grown_.clear(), opened_.clear(), closed_.clear();
    pool_.forget_log();
    const std::unique_lock<std::mutex> lock = lock_incoming(controls);
    try {
        for (const Control& control : controls) apply(control);
        log_size_after_controls_ = pool_.log_size();
        for (const Span& span : spans) span.is_stored() ? grow(span) : check_read(span);
        if (!opened_.empty()) incoming_.reserve(incoming_.size() + opened_.size());
    } catch (...) {
        abandon_step();
        pool_.undo_to(0);
        for (auto entry = before_.rbegin(); entry != before_.rend(); ++entry) {
            sequences_.erase(entry->first);
            if (entry->second) sequences_.emplace(entry->first, std::move(*entry->second));
        }
        throw;
    }
    if (lock.owns_lock()) {  // rows may be stored into the blocks at any time afterwards
        for (std::size_t layer = 0; layer < layers_.size(); ++layer) edit_layer(std::int64_t(layer));
        edits_.clear();
    }
    incoming_.merge(opened_);
    for (const std::int64_t job_id : closed_) incoming_.erase(job_id);
}

std::int64_t KVCache::edit_bytes() const {
    constexpr std::int64_t kTurning = 5;  // turning a tile of 2 KB takes 0.9 us, the time of reading five times as much
    std::int64_t tile_bytes = 0, bytes = 0;
    for (std::size_t layer = 0; layer < layers_.size(); ++layer)
        tile_bytes += layouts_[layer].key_tile_bytes * layers_[layer].num_kv_heads;
    for (const auto& [from, to, tile] : edits_)
        bytes += (from != to ? block_bytes_ : 0) + (tile >= 0 ? kTurning * tile_bytes : 0);
    return bytes;
}

void KVCache::edit_layer(std::int64_t layer) const {
    for (const auto& [from, to, tile] : edits_) {
        if (from != to) copy_block(layer, from, to);
        if (tile >= 0) turn_to_rows(layer, to, tile);
    }
}

void KVCache::commit_step() {
    for (const std::int64_t id : grown_) {
        Sequence& sequence = sequences_.at(id);
        if (sequence.kept && sequence.kept.use_count() == 1) sequence.spare = std::move(sequence.kept);
        sequence.kept = std::move(sequence.coming);
        sequence.first_kept = 0;
        sequence.kept_lone = sequence.coming_lone;
        sequence.num_kept = sequence.kept ? sequence.pending_length - sequence.length : 0;
        const std::int64_t start = std::exchange(sequence.length, sequence.pending_length);
        note_full(id, start);
        sequence.born_in_step = false;
    }
    grown_.clear();
    drop_unbegun();
}

void KVCache::abandon_step(bool written) {
    for (const std::int64_t id : grown_) {
        Sequence& sequence = sequences_.at(id);
        sequence.blocks.resize(blocks_for(sequence.length));
        sequence.pending_length = sequence.length;
        if (written && sequence.coming) settled(id, sequence.num_kept);
        if (written && !sequence.coming) sequence.state_spoilt |= !sequence.state_blocks.empty();
        sequence.coming.reset();
        if (sequence.born_in_step) sequences_.erase(id);
    }
    if (!grown_.empty()) pool_.undo_to(log_size_after_controls_);
    grown_.clear();
}

void KVCache::grow(const Span& span) {
    const std::string name = "span of " + name_of(span.sequence_id);
    auto found = sequences_.find(span.sequence_id);
    const std::int64_t length = found == sequences_.end() ? 0 : found->second.length;
    if (span.num_rows < 1)
        throw Error(name + ": num_rows is " + std::to_string(span.num_rows) + "; it must be at least 1");
    if (found == sequences_.end() && span.context_len != 0)
        throw UnknownSequence(name + ": unknown sequence with context_len " + std::to_string(span.context_len) +
                              "; a new sequence starts with 0");
    if (found != sequences_.end() && found->second.job_id)
        throw Error(name + ": it is incoming; commit comes first");
    if (found != sequences_.end() && found->second.state_spoilt)
        throw Error(name + ": its state was written by a step that was abandoned; release comes first");
    if (span.num_rows > pool_.num_blocks() * block_size_)
        throw Error(name + ": out of blocks: a bug in the scheduler: num_rows is " + std::to_string(span.num_rows) +
                    ", more than the whole cache holds");
    if (span.context_len != length)
        throw Error(name + ": context_len is " + std::to_string(span.context_len) + ", but the cache holds " +
                    std::to_string(length) + " tokens");
    if (found == sequences_.end()) {
        found = sequences_.emplace(span.sequence_id, Sequence{}).first;
        found->second.born_in_step = true;
        take_state(found->second);
    } else if (found->second.pending_length != length) {
        throw Error(name + ": a sequence may appear once in a step");
    }
    Sequence& sequence = found->second;
    sequence.pending_length = length + span.num_rows;
    const std::int64_t least = span.has_queries() ? states_.least_kept() : 1;
    if (span.num_rows >= least && span.num_rows <= states_.most_kept())
        sequence.coming = sequence.spare ? std::move(sequence.spare) : KeptRows(new std::uint8_t[states_.kept_bytes()]);
    sequence.coming_lone = sequence.coming && span.num_rows == 1 && span.has_queries();
    grown_.push_back(span.sequence_id);
    while (std::int64_t(sequence.blocks.size()) < blocks_for(sequence.pending_length))
        sequence.blocks.push_back(pool_.take());
}

void KVCache::take_state(Sequence& sequence) {
    while (std::int64_t(sequence.state_blocks.size()) < states_.num_blocks()) sequence.state_blocks.push_back(pool_.take());
}

/// A closed range is one node of the tree in which splits are merged, so its number of splits is a power of two.
void KVCache::check_read(const Span& span) const {
    const std::string name = "span that reads " + name_of(span.sequence_id);
    const std::int64_t length = whole_sequence(span.sequence_id).length;
    if (length % kSplitTokens != 0 || !std::has_single_bit(std::uint64_t(length / kSplitTokens)))
        throw Error(name + ": it holds " + std::to_string(length) + " tokens; a closed range has " +
                    std::to_string(kSplitTokens) + " times a power of two");
    if (span.context_len < length || span.context_len > kMostPositions)
        throw Error(name + ": context_len is " + std::to_string(span.context_len) + "; rows that read a range of " +
                    std::to_string(length) + " tokens come after it, and before token " +
                    std::to_string(kMostPositions));
    if (span.num_rows < 1 || span.num_rows > kMostReadRows)
        throw Error(name + ": num_rows is " + std::to_string(span.num_rows) + "; it must be 1 to " +
                    std::to_string(kMostReadRows));
}

void KVCache::copy_block(std::int64_t layer, std::int32_t from, std::int32_t to) const {
    const LayerLayout& layout = layouts_[layer];
    std::uint8_t* region = arena_.data() + layout.region_offset_bytes;
    std::memcpy(region + to * layout.block_bytes, region + from * layout.block_bytes, layout.block_bytes);
}

void KVCache::unwrite(std::int64_t layer, const std::int32_t* blocks, std::int64_t context_len,
                      std::int64_t end) const {
    const std::int64_t tile = tile_cut(context_len, end);
    if (tile >= 0) turn_to_rows(layer, blocks[context_len / block_size_], tile);
}

void KVCache::turn_to_rows(std::int64_t layer, std::int32_t block, std::int64_t tile) const {
    if (has_latent_codes(layers_[layer], dtype_) || layers_[layer].keeps_rows()) return;  // such tiles are always rows
    for (std::int64_t head = 0; head < layers_[layer].num_kv_heads; ++head) {
        const HeadView head_view = view(layer, head, nullptr);
        turn_keys_to_rows(dtype_of(layers_[layer], dtype_),
                          head_view.base + block * head_view.block_stride_bytes + tile * head_view.key_tile_bytes,
                          layers_[layer].key_dim);
    }
}

/// The tile, in its block, that becomes the last one and not full when a sequence of `length` tokens is cut to
/// `num_tokens`, if it was full before; -1: none.
std::int64_t KVCache::tile_cut(std::int64_t num_tokens, std::int64_t length) const {
    const std::int64_t first = num_tokens / kTileTokens * kTileTokens;
    if (first == num_tokens || key_order(first, length) == KeyOrder::rows) return -1;
    return first % block_size_ / kTileTokens;
}

const Sequence& KVCache::sequence(std::int64_t sequence_id) const {
    const auto found = sequences_.find(sequence_id);
    if (found == sequences_.end())
        throw UnknownSequence(name_of(sequence_id) + " is unknown; it was never opened or is released");
    return found->second;
}

const Sequence& KVCache::whole_sequence(std::int64_t sequence_id) const {
    const Sequence& found = sequence(sequence_id);
    if (found.job_id) throw Error(name_of(sequence_id) + " is incoming; commit or release comes first");
    return found;
}

std::vector<std::int64_t> KVCache::sequence_ids() const {
    std::vector<std::int64_t> ids;
    for (const auto& entry : sequences_) ids.push_back(entry.first);
    std::sort(ids.begin(), ids.end());
    return ids;
}

std::vector<std::int64_t> KVCache::incoming_ids() const {
    std::vector<std::int64_t> ids = sequence_ids();
    std::erase_if(ids, [&](std::int64_t id) { return !sequences_.at(id).job_id; });
    return ids;
}

HeadView KVCache::view(std::int64_t layer, std::int64_t kv_head, const std::int32_t* blocks) const {
    const LayerLayout& layout = layouts_[layer];
    return {arena_.data() + layout.region_offset_bytes + kv_head * layout.head_bytes,
            blocks,
            layout.block_bytes,
            layout.values_offset_bytes,
            layout.key_tile_bytes,
            layout.value_tile_bytes,
            std::countr_zero(std::uint64_t(block_size_ / kTileTokens))};
}

}  // namespace rworker
