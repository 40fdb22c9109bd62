#include "rworker/block_checksums.hpp"

#include <string>

#include "rworker/kv_cache.hpp"

namespace rworker {
namespace {

constexpr Checksum kStart{};

}  // namespace

void BlockChecksums::keep(std::int64_t num_blocks, std::int64_t num_layers) {
    if (are_kept()) return;
    num_layers_ = num_layers;
    lives_.assign(num_blocks, 0);
    sums_.assign(num_blocks * num_layers, kStart);
}

void BlockChecksums::set(std::int32_t block, std::int64_t layer, std::uint32_t lives,
                         std::span<const std::uint8_t> bytes) {
    sums_[block * num_layers_ + layer] = checksum(bytes, kStart);
    lives_[block] = lives;
}

bool BlockChecksums::holds(std::int32_t block, std::int64_t layer, std::uint32_t lives,
                           std::span<const std::uint8_t> bytes) const {
    return lives_[block] != lives || sums_[block * num_layers_ + layer] == checksum(bytes, kStart);
}

void BlockChecksums::forget(std::int32_t block) {
    if (are_kept()) lives_[block] = 0;
}

void KVCache::keep_checksums() { checksums_.keep(pool_.num_blocks(), std::int64_t(layers_.size())); }

std::span<std::uint8_t> KVCache::layer_bytes(std::int64_t layer, std::int32_t block) const {
    const LayerLayout& layout = layouts_[layer];
    return {arena_.data() + layout.region_offset_bytes + block * layout.block_bytes, std::size_t(layout.block_bytes)};
}

void KVCache::note_full(std::int64_t sequence_id, std::int64_t start) {
    if (!checksums_.are_kept()) return;
    const Sequence& sequence = sequences_.at(sequence_id);
    for (std::int64_t i = start / block_size_; i < sequence.length / block_size_; ++i)
        for (std::int64_t layer = 0; layer < std::int64_t(layers_.size()); ++layer)
            checksums_.set(sequence.blocks[i], layer, pool_.lives(sequence.blocks[i]),
                           layer_bytes(layer, sequence.blocks[i]));
}

std::int64_t KVCache::find_damage(std::int64_t sequence_id, std::int64_t num_tokens, std::int64_t layer) const {
    const Sequence& checked = sequence(sequence_id);
    require(layer < std::int64_t(layers_.size()), "find_damage: layer is " + std::to_string(layer) + "; there are " +
                                                      std::to_string(layers_.size()));
    require(num_tokens <= checked.length, "find_damage: num_tokens is " + std::to_string(num_tokens) + "; there are " +
                                              std::to_string(checked.length));
    if (!checksums_.are_kept()) return -1;
    const std::int64_t num_full = (num_tokens < 0 ? checked.length : num_tokens) / block_size_;
    const std::int64_t first = layer < 0 ? 0 : layer, end = layer < 0 ? std::int64_t(layers_.size()) : layer + 1;
    for (std::int64_t i = 0; i < num_full; ++i)
        for (std::int64_t each = first; each < end; ++each)
            if (!checksums_.holds(checked.blocks[i], each, pool_.lives(checked.blocks[i]),
                                  layer_bytes(each, checked.blocks[i])))
                return i;
    return -1;
}

void KVCache::flip_bit(std::int64_t sequence_id, std::int64_t layer, std::int64_t token, std::int64_t bit) const {
    const Sequence& sequence = whole_sequence(sequence_id);
    require(layer >= 0 && layer < std::int64_t(layers_.size()) && token >= 0 && token < sequence.length && bit >= 0,
            "flip_bit: there is no such layer, token or bit");
    const std::span<std::uint8_t> bytes = layer_bytes(layer, sequence.blocks[token / block_size_]);
    require(!bytes.empty(), "flip_bit: the layer caches no rows");
    bytes[bit / 8 % std::int64_t(bytes.size())] ^= std::uint8_t(1 << bit % 8);
}

}  // namespace rworker
