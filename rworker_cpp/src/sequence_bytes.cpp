// A sequence as token-major bytes, the same whatever the block size and instruction set: how it moves between caches.
#include <cstring>
#include <string>

#include "rworker/kv_cache.hpp"
#include "rworker/token_codec.hpp"

namespace rworker {
namespace {

TokenPlace place_of(const HeadView& view, std::int64_t position) {
    const std::int64_t tile = position / kTileTokens, tiles_per_block = std::int64_t(1) << view.log2_tiles_per_block;
    std::uint8_t* block = view.base + view.blocks[tile / tiles_per_block] * view.block_stride_bytes;
    const std::int64_t within = tile % tiles_per_block;
    return {block + within * view.key_tile_bytes, block + view.values_offset_bytes + within * view.value_tile_bytes,
            position % kTileTokens};
}

void require(bool holds, const std::string& message) {
    if (!holds) throw Error("import: " + message);
}

}  // namespace

std::int64_t KVCache::sequence_bytes(std::int64_t num_tokens) const {
    std::int64_t bytes = 0;
    for (const LayerSpec& layer : layers_) bytes += num_tokens * TokenCodec(dtype_, layer).token_bytes();
    return bytes;
}

void KVCache::export_sequence(std::int64_t sequence_id, std::uint8_t* out) const {
    const Sequence& source = sequence(sequence_id);
    for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
        const TokenCodec codec(dtype_, layers_[layer]);
        const std::int64_t num_heads = layers_[layer].num_kv_heads;
        for (std::int64_t head = 0; head < num_heads; ++head) {
            const HeadView head_view = view(std::int64_t(layer), head, source.blocks.data());
            std::uint8_t* token = out;
            for (std::int64_t position = 0; position < source.length; ++position, token += codec.token_bytes()) {
                const TokenPlace place = place_of(head_view, position);
                codec.read_key(place, token + head * codec.key_bytes());
                codec.read_value(place, token + num_heads * codec.key_bytes() + head * codec.value_bytes());
            }
        }
        out += source.length * codec.token_bytes();
    }
}

void KVCache::import_sequence(std::int64_t sequence_id, std::int64_t num_tokens, std::span<const std::uint8_t> data) {
    check_import(sequence_id, num_tokens, std::int64_t(data.size()));
    Sequence& target = sequences_[sequence_id];
    target.blocks.reserve(blocks_for(num_tokens));
    pool_.forget_log();
    while (std::int64_t(target.blocks.size()) < blocks_for(num_tokens)) target.blocks.push_back(pool_.take());
    target.length = target.pending_length = num_tokens;
    for (const std::int32_t block : target.blocks) clear_block(block);
    const std::uint8_t* from = data.data();
    for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
        const TokenCodec codec(dtype_, layers_[layer]);
        const std::int64_t num_heads = layers_[layer].num_kv_heads;
        for (std::int64_t head = 0; head < num_heads; ++head) {
            const HeadView head_view = view(std::int64_t(layer), head, target.blocks.data());
            const std::uint8_t* token = from;
            for (std::int64_t position = 0; position < num_tokens; ++position, token += codec.token_bytes()) {
                const TokenPlace place = place_of(head_view, position);
                codec.write_key(place, token + head * codec.key_bytes());
                codec.write_value(place, token + num_heads * codec.key_bytes() + head * codec.value_bytes());
            }
        }
        from += num_tokens * codec.token_bytes();
    }
}

void KVCache::check_import(std::int64_t sequence_id, std::int64_t num_tokens, std::int64_t num_bytes) const {
    require(!sequences_.contains(sequence_id), "sequence " + std::to_string(sequence_id) + " exists already");
    require(num_tokens >= 0, "num_tokens is " + std::to_string(num_tokens) + "; it must not be negative");
    require(num_tokens <= pool_.num_free() * block_size_,
            "out of blocks: num_tokens is " + std::to_string(num_tokens) + ", and " + std::to_string(pool_.num_free()) +
                " free blocks of " + std::to_string(block_size_) + " tokens hold " +
                std::to_string(pool_.num_free() * block_size_));
    require(num_bytes == sequence_bytes(num_tokens),
            "data has " + std::to_string(num_bytes) + " bytes; keys and values of " + std::to_string(num_tokens) +
                " tokens take " + std::to_string(sequence_bytes(num_tokens)) + " in this cache's layers and dtype");
}

void KVCache::clear_block(std::int32_t block) const {
    for (const LayerLayout& layout : layouts_)
        std::memset(arena_.data() + layout.region_offset_bytes + block * layout.block_bytes, 0, layout.block_bytes);
}

}  // namespace rworker
