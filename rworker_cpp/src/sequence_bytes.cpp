// A sequence token by token: as floats, and as bytes that do not depend on block size and instruction set. In this form
// it moves between caches.
#include <cstring>
#include <string>

#include "kernels/latent_row.hpp"
#include "rworker/kv_cache.hpp"
#include "rworker/token_codec.hpp"

namespace rworker {
namespace {

TokenPlace place_of(const LayerSpec& layer, const HeadView& view, std::int64_t position, std::int64_t length) {
    const std::int64_t tile = position / kTileTokens, tiles_per_block = std::int64_t(1) << view.log2_tiles_per_block;
    std::uint8_t* block = view.base + view.blocks[tile / tiles_per_block] * view.block_stride_bytes;
    const std::int64_t within = tile % tiles_per_block;
    return {block + within * view.key_tile_bytes, block + view.values_offset_bytes + within * view.value_tile_bytes,
            layer.keeps_rows() ? KeyOrder::rows : key_order(tile * kTileTokens, length), position % kTileTokens};
}

/// The floats of a latent row of codes.
void read_row(const LayerSpec& spec, DType dtype, const TokenPlace& at, float* keys) {
    const std::uint8_t* const row = at.key_tile + at.token * TokenCodec(dtype, spec).key_bytes();
    const auto read = dtype == DType::int8 ? read_latent<DType::int8> : read_latent<DType::int4>;
    read(row, int(spec.value_dim), int(spec.key_dim - spec.value_dim), keys);
}

void require_of_import(bool holds, const std::string& message) {
    if (!holds) throw Error("import: " + message);
}

/// A state that begins a later segment: tokens before the segment. The bound keeps positions within int64.
void require_base(std::int64_t base) {
    constexpr std::int64_t most = std::int64_t(1) << 40;
    require_of_import(base > 0 && base <= most, "a state of " + std::to_string(base) + " tokens before its segment; at most " +
                                                    std::to_string(most) + ", and at least 1");
}

}  // namespace

std::int64_t KVCache::sequence_bytes(std::int64_t num_tokens) const {
    std::int64_t bytes = 0;
    for (std::int64_t layer = 0; layer < std::int64_t(layers_.size()); ++layer) bytes += num_tokens * token_bytes(layer);
    return bytes;
}

std::int64_t KVCache::token_bytes(std::int64_t layer) const { return TokenCodec(dtype_, layers_[layer]).token_bytes(); }

/// Calls f(position, KV head, place of the token) for the tokens [start, end).
template <class F>
void KVCache::for_each_token(const Sequence& sequence, std::int64_t layer, std::int64_t start, std::int64_t end,
                             F f) const {
    for (std::int64_t head = 0; head < layers_[layer].num_kv_heads; ++head) {
        const HeadView head_view = view(layer, head, sequence.blocks.data());
        for (std::int64_t position = start; position < end; ++position)
            f(position, head, place_of(layers_[layer], head_view, position, sequence.pending_length));
    }
}

void KVCache::read_tokens(std::int64_t sequence_id, std::int64_t layer, float* keys, float* values) const {
    const LayerSpec& spec = layers_[layer];
    const DType dtype = dtype_of(spec, dtype_);
    const Sequence& sequence = whole_sequence(sequence_id);
    for_each_token(sequence, layer, 0, sequence.length, [&](std::int64_t position, std::int64_t head,
                                                            const TokenPlace& at) {
        const std::int64_t row = position * spec.num_kv_heads + head;
        if (has_latent_codes(spec, dtype_)) return read_row(spec, dtype_, at, keys + row * spec.key_dim);
        for (std::int64_t dim = 0; dim < spec.key_dim; ++dim)
            keys[row * spec.key_dim + dim] = load_key(dtype, at.key_order, at.key_tile, at.token, dim, spec.key_dim);
        for (std::int64_t dim = 0; dim < spec.stored_value_dim(); ++dim)
            values[row * spec.value_dim + dim] = load_value(dtype, at.value_tile, at.token, dim, spec.value_dim);
        if (!is_rotated(dtype)) return;
        rotate(keys + row * spec.key_dim, int(spec.key_dim));
        rotate(values + row * spec.value_dim, int(spec.value_dim));
    });
}

/// Reads rows [start, end) of `rows`.
void KVCache::read_slice(const Incoming& job, std::int64_t layer, const OutgoingRows& rows, std::int64_t start,
                         std::int64_t end) const {
    const TokenCodec codec(dtype_, layers_[layer]);
    const std::int64_t length = job.length_seen(layer), heads = layers_[layer].num_kv_heads;
    for (std::int64_t head = 0; head < heads; ++head) {
        const HeadView head_view = view(layer, head, job.blocks().data());
        for (std::int64_t position = start; position < end; ++position) {
            const TokenPlace place = place_of(layers_[layer], head_view, position, length);
            std::uint8_t* const token = rows.bytes + (position - rows.start) * codec.token_bytes();
            codec.read_key(place, token + head * codec.key_bytes());
            codec.read_value(place, token + heads * codec.key_bytes() + head * codec.value_bytes());
        }
    }
}

/// Calls f(codec, place of the token, address of its key and of its value in `bytes`) for tokens [start, end) of all
/// layers.
template <class Bytes, class F>
void KVCache::walk_bytes(const Sequence& sequence, std::int64_t start, std::int64_t end, Bytes* bytes, F f) const {
    for (std::int64_t layer = 0; layer < std::int64_t(layers_.size()); ++layer) {
        const TokenCodec codec(dtype_, layers_[layer]);
        const std::int64_t keys = layers_[layer].num_kv_heads * codec.key_bytes();
        for_each_token(sequence, layer, start, end,
                       [&](std::int64_t position, std::int64_t head, const TokenPlace& place) {
                           Bytes* const token = bytes + (position - start) * codec.token_bytes();
                           f(codec, place, token + head * codec.key_bytes(), token + keys + head * codec.value_bytes());
                       });
        bytes += (end - start) * codec.token_bytes();
    }
}

void KVCache::check_export(std::int64_t sequence_id, std::int64_t start, std::int64_t num_tokens) const {
    const std::int64_t length = whole_sequence(sequence_id).length;
    if (start < 0 || num_tokens < 0 || start > length || num_tokens > length - start)
        throw Error("export: " + std::to_string(num_tokens) + " tokens from token " + std::to_string(start) +
                    " on; sequence " + std::to_string(sequence_id) + " has " + std::to_string(length));
}

void KVCache::export_sequence(std::int64_t sequence_id, std::int64_t start, std::int64_t num_tokens,
                              std::uint8_t* out) const {
    check_export(sequence_id, start, num_tokens);
    walk_bytes(whole_sequence(sequence_id), start, start + num_tokens, out,
               [](const TokenCodec& codec, const TokenPlace& place, std::uint8_t* key, std::uint8_t* value) {
                   codec.read_key(place, key);
                   codec.read_value(place, value);
               });
    const Sequence& sequence = whole_sequence(sequence_id);
    if (!has_state_at(sequence_id, start + num_tokens)) return;
    copy_state(sequence, out + sequence_bytes(num_tokens));
    if (sequence.state_base)
        std::memcpy(out + sequence_bytes(num_tokens) + states_.num_bytes(), &sequence.state_base, sizeof(std::int64_t));
}

std::int64_t KVCache::state_bytes(std::int64_t sequence_id, std::int64_t num_tokens) const {
    if (!has_state_at(sequence_id, num_tokens)) return 0;
    return states_.num_bytes() + (sequence(sequence_id).state_base ? std::int64_t(sizeof(std::int64_t)) : 0);
}

void KVCache::export_layer(std::int64_t sequence_id, std::int64_t layer, bool as_blocks, std::uint8_t* out) const {
    const Sequence& sequence = whole_sequence(sequence_id);
    const TokenCodec codec(dtype_, layers_[layer]);
    const std::int64_t keys = layers_[layer].num_kv_heads * codec.key_bytes();
    const std::int64_t num_full = as_blocks ? sequence.pending_length / block_size_ : 0, start = num_full * block_size_;
    for (std::int64_t i = 0; i < num_full; ++i) {
        const std::span<const std::uint8_t> block = layer_bytes(layer, sequence.blocks[i]);
        std::memcpy(out, block.data(), block.size());
        out += block.size();
    }
    for_each_token(sequence, layer, start, sequence.pending_length,
                   [&](std::int64_t position, std::int64_t head, const TokenPlace& place) {
                       std::uint8_t* const token = out + (position - start) * codec.token_bytes();
                       codec.read_key(place, token + head * codec.key_bytes());
                       codec.read_value(place, token + keys + head * codec.value_bytes());
                   });
}

bool KVCache::has_state_at(std::int64_t sequence_id, std::int64_t num_tokens) const {
    const Sequence& sequence = whole_sequence(sequence_id);
    return states_.num_blocks() && !sequence.state_spoilt && num_tokens <= sequence.length &&
           num_tokens >= sequence.length - sequence.num_kept;
}

std::int64_t KVCache::least_length(std::int64_t sequence_id) const {
    const Sequence& sequence = whole_sequence(sequence_id);
    if (sequence.state_spoilt) return sequence.length + 1;
    return states_.num_blocks() ? sequence.length - sequence.num_kept : 0;
}

void KVCache::settled(std::int64_t sequence_id, std::int64_t count) {
    Sequence& sequence = sequences_.at(sequence_id);
    sequence.first_kept += count;
    sequence.num_kept -= count;
}

void KVCache::copy_state(const Sequence& sequence, std::uint8_t* out) const {
    const std::int64_t bytes = 4 * states_.row_floats();
    for (std::int64_t i = 0; i < states_.num_rows(); ++i)
        std::memcpy(out + i * bytes, state_row(sequence.state_blocks.data(), i), bytes);
}

void KVCache::set_state(const Sequence& sequence, const std::uint8_t* data) const {
    const std::int64_t bytes = 4 * states_.row_floats();
    for (std::int64_t i = 0; i < states_.num_rows(); ++i)
        std::memcpy(state_row(sequence.state_blocks.data(), i), data + i * bytes, bytes);
}

void KVCache::import_sequence(std::int64_t sequence_id, std::int64_t start, std::int64_t num_tokens,
                              std::span<const std::uint8_t> data) {
    if (num_tokens == 0 && start > 0 && !sequences_.contains(sequence_id)) return begin_from_state(sequence_id, start, data);
    check_import(sequence_id, start, num_tokens);
    const std::int64_t num_bytes = std::int64_t(data.size()), length = start + num_tokens;
    const std::int64_t state_bytes = num_bytes - sequence_bytes(num_tokens), base_bytes = sizeof(std::int64_t);
    require_of_import(state_bytes == 0 || (states_.num_blocks() && (state_bytes == states_.num_bytes() ||
                                                                     state_bytes == states_.num_bytes() + base_bytes)),
            "data has " + std::to_string(num_bytes) + " bytes; keys and values of " + std::to_string(num_tokens) +
                " tokens take " + std::to_string(sequence_bytes(num_tokens)) + " in this cache's layers and dtype");
    std::int64_t base = 0;
    if (state_bytes > states_.num_bytes()) {
        std::memcpy(&base, data.data() + num_bytes - base_bytes, sizeof(std::int64_t));
        require_base(base);
    }
    Sequence& target = grown(sequence_id, length, true);
    if (base) target.state_base = base;
    if (state_bytes > 0) {
        set_state(target, data.data() + sequence_bytes(num_tokens));
        target.state_spoilt = false;
    }
    walk_bytes(
        target, start, length, data.data(),
        [](const TokenCodec& codec, const TokenPlace& place, const std::uint8_t* key, const std::uint8_t* value) {
            codec.write_key(place, key);
            codec.write_value(place, value);
        });
    note_full(sequence_id, start);
}

void KVCache::begin_from_state(std::int64_t sequence_id, std::int64_t base, std::span<const std::uint8_t> data) {
    const std::int64_t num_bytes = std::int64_t(data.size()), base_bytes = sizeof(std::int64_t);
    require_of_import(states_.num_blocks() && (num_bytes == states_.num_bytes() || num_bytes == states_.num_bytes() + base_bytes),
                      "data has " + std::to_string(num_bytes) + " bytes, and a state in this cache takes " +
                          std::to_string(states_.num_bytes()));
    require_of_import(states_.num_blocks() <= pool_.num_free(),
                      "out of blocks: a state takes " + std::to_string(states_.num_blocks()) + ", and " +
                          std::to_string(pool_.num_free()) + " are free");
    require_base(base);
    Sequence& target = grown(sequence_id, 0, false);
    set_state(target, data.data());
    target.state_spoilt = false;
    target.state_base = base;
    begun_.push_back(sequence_id);
}

void KVCache::drop_unbegun() {
    for (const std::int64_t id : begun_) {
        const auto found = sequences_.find(id);
        if (found == sequences_.end() || found->second.length > 0) continue;
        for (const std::int32_t block : found->second.state_blocks) pool_.drop_reference(block);
        sequences_.erase(found);
    }
    begun_.clear();
}

/// Returns the sequence, new or not, with blocks for `length` committed tokens; `cleared`: new blocks are zeros. A state
/// is spoilt until it is set.
Sequence& KVCache::grown(std::int64_t sequence_id, std::int64_t length, bool cleared) {
    Sequence& target = sequences_[sequence_id];
    target.blocks.reserve(blocks_for(length));
    pool_.forget_log();
    while (std::int64_t(target.blocks.size()) < blocks_for(length)) {
        target.blocks.push_back(pool_.take());
        if (cleared) clear_block(target.blocks.back());
    }
    target.length = target.pending_length = length;
    take_state(target);
    target.state_spoilt = states_.num_blocks() > 0;
    return target;
}

void KVCache::check_import(std::int64_t sequence_id, std::int64_t start, std::int64_t num_tokens) const {
    const auto number = [](std::int64_t value) { return std::to_string(value); };
    require_of_import(start >= 0, "start is " + number(start) + "; it must not be negative");
    require_of_import(num_tokens >= 0, "num_tokens is " + number(num_tokens) + "; it must not be negative");
    if (start == 0) {
        require_of_import(!sequences_.contains(sequence_id), "sequence " + number(sequence_id) + " exists already");
    } else {
        const std::int64_t length = whole_sequence(sequence_id).length;
        require_of_import(start == length,
                "start is " + number(start) + ", and sequence " + number(sequence_id) + " has " + number(length) + " tokens");
        require_of_import(start % block_size_ == 0 || sequence_bytes(1) == 0,
                "start is " + number(start) + "; it must be a multiple of the block size, " + number(block_size_));
    }
    const std::int64_t num_free = pool_.num_free() - (start == 0 ? states_.num_blocks() : 0);
    require_of_import(num_tokens <= num_free * block_size_,
            "out of blocks: num_tokens is " + number(num_tokens) + ", and " + number(num_free) +
                " free blocks of " + number(block_size_) + " tokens hold " + number(num_free * block_size_));
}

void KVCache::clear_block(std::int32_t block) const {
    for (const LayerLayout& layout : layouts_)
        std::memset(arena_.data() + layout.region_offset_bytes + block * layout.block_bytes, 0, layout.block_bytes);
}

}  // namespace rworker
