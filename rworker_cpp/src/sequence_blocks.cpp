// Exports and imports whole blocks of a sequence as they lie in this cache, at the speed of memory. Both caches need
// the same layers, dtype, block size and instruction set. A sequence's state is exchanged by `export_sequence`.
#include <cstring>
#include <string>

#include "rworker/kv_cache.hpp"

namespace rworker {
namespace {

/// Calls f(address of a run of blocks in the arena, address in `bytes`, number of bytes) for each layer and each run of
/// consecutive blocks.
template <class Byte, class F>
void for_each_run(const std::vector<LayerLayout>& layouts, std::uint8_t* arena, std::span<const std::int32_t> blocks,
                  Byte* bytes, F f) {
    for (const LayerLayout& layout : layouts) {
        for (std::size_t first = 0; first < blocks.size();) {
            std::size_t end = first + 1;
            while (end < blocks.size() && blocks[end] == blocks[end - 1] + 1) ++end;
            const std::int64_t num_bytes = std::int64_t(end - first) * layout.block_bytes;
            f(arena + layout.region_offset_bytes + blocks[first] * layout.block_bytes, bytes, num_bytes);
            bytes += num_bytes;
            first = end;
        }
    }
}

}  // namespace

std::int64_t KVCache::blocks_bytes(std::int64_t start, std::int64_t num_tokens) const {
    if (start % block_size_ != 0 || num_tokens % block_size_ != 0)
        throw Error("blocks: " + std::to_string(num_tokens) + " tokens from token " + std::to_string(start) +
                    " on are no whole blocks of " + std::to_string(block_size_) + " tokens");
    return num_tokens / block_size_ * block_bytes_;
}

void KVCache::export_blocks(std::int64_t sequence_id, std::int64_t start, std::int64_t num_tokens,
                            std::uint8_t* out) const {
    check_export(sequence_id, start, num_tokens);
    blocks_bytes(start, num_tokens);
    const std::vector<std::int32_t>& blocks = whole_sequence(sequence_id).blocks;
    for_each_run(layouts_, arena_.data(), {blocks.data() + start / block_size_, std::size_t(num_tokens / block_size_)}, out,
                 [](const std::uint8_t* in_arena, std::uint8_t* bytes, std::int64_t num_bytes) {
                     std::memcpy(bytes, in_arena, num_bytes);
                 });
}

void KVCache::import_blocks(std::int64_t sequence_id, std::int64_t start, std::int64_t num_tokens,
                            std::span<const std::uint8_t> data) {
    check_import(sequence_id, start, num_tokens);
    if (std::int64_t(data.size()) != blocks_bytes(start, num_tokens))
        throw Error("import: data has " + std::to_string(data.size()) + " bytes; blocks of " + std::to_string(num_tokens) +
                    " tokens take " + std::to_string(blocks_bytes(start, num_tokens)));
    const std::size_t first = std::size_t(start / block_size_);
    const std::vector<std::int32_t>& blocks = grown(sequence_id, start + num_tokens, false).blocks;
    for_each_run(layouts_, arena_.data(), {blocks.data() + first, blocks.size() - first}, data.data(),
                 [](std::uint8_t* in_arena, const std::uint8_t* bytes, std::int64_t num_bytes) {
                     std::memcpy(in_arena, bytes, num_bytes);
                 });
    note_full(sequence_id, start);
}

void KVCache::place_blocks(std::int64_t sequence_id, std::int64_t start, std::int64_t num_tokens) {
    check_import(sequence_id, start, num_tokens);
    blocks_bytes(start, num_tokens);
    grown(sequence_id, start + num_tokens, false);
}

std::vector<std::span<std::uint8_t>> KVCache::block_runs(std::int64_t sequence_id, std::int64_t start,
                                                         std::int64_t num_tokens) const {
    check_export(sequence_id, start, num_tokens);
    blocks_bytes(start, num_tokens);
    const std::vector<std::int32_t>& blocks = whole_sequence(sequence_id).blocks;
    std::vector<std::span<std::uint8_t>> runs;
    for_each_run(layouts_, arena_.data(), {blocks.data() + start / block_size_, std::size_t(num_tokens / block_size_)},
                 arena_.data(), [&](std::uint8_t* in_arena, const std::uint8_t*, std::int64_t num_bytes) {
                     runs.emplace_back(in_arena, std::size_t(num_bytes));
                 });
    return runs;
}

}  // namespace rworker
