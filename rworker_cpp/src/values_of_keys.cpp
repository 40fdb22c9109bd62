#include "rworker/values_of_keys.hpp"

#include <algorithm>
#include <cstring>

namespace rworker {
namespace {

/// Where word `line` of a token's keys lies in a tile: in lanes of tokens if the tile is full, else in rows.
struct KeyWords {
    std::int64_t token_stride, line_stride;

    KeyWords(bool full, std::int64_t lines) : token_stride(full ? 1 : lines), line_stride(full ? kTileTokens : 1) {}
};

/// One element per word: values are [token][dim].
template <class Word>
void turn_tile(const Word* keys, KeyWords at, int tokens, int value_dim, int padded_dim, Word* values) {
    for (int first = 0; first < tokens; first += 4) {
        const int count = std::min(tokens - first, 4);
        for (int dim = 0; dim < value_dim; ++dim)
            for (int token = first; token < first + count; ++token)
                values[token * padded_dim + dim] = keys[token * at.token_stride + dim * at.line_stride];
    }
}

/// Pairs of dims per word become pairs of tokens: values are [token pair][dim][2 tokens]. A last token without a
/// partner gets zeros.
void turn_pairs(const std::uint32_t* keys, KeyWords at, int tokens, int value_dim, int padded_dim,
                std::uint32_t* values) {
    for (int line = 0; line < (value_dim + 1) / 2; ++line)
        for (int token = 0; token < tokens; token += 2) {
            const std::uint32_t* const word = keys + token * at.token_stride + line * at.line_stride;
            const std::uint32_t a = *word, b = token + 1 < tokens ? word[at.token_stride] : 0;
            const std::uint32_t dims[2] = {(a & 0xffff) | b << 16, a >> 16 | (b & 0xffff0000)};
            std::memcpy(values + token / 2 * padded_dim + 2 * line, dims, sizeof(dims));
        }
}

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define RWORKER_SHUFFLES_HALVES
#endif
#endif

#ifdef RWORKER_SHUFFLES_HALVES
using Halves = std::uint16_t __attribute__((vector_size(16)));

/// Turns a line's words of four tokens, two dims each, into two pairs of tokens: of each pair first one dim, then the
/// other.
Halves pair_tokens(const std::uint32_t* words) {
    Halves line;
    std::memcpy(&line, words, sizeof(line));
    return __builtin_shufflevector(line, line, 0, 2, 1, 3, 4, 6, 5, 7);
}

void store(std::uint32_t* words, Halves halves) { std::memcpy(words, &halves, sizeof(halves)); }

/// Like turn_pairs, for a full tile: two lines at once give four dims of each pair of tokens.
void turn_full_pairs(const std::uint32_t* keys, int value_dim, int padded_dim, std::uint32_t* values) {
    int dim = 0;
    for (; dim + 4 <= value_dim; dim += 4, keys += 2 * kTileTokens)
        for (int token = 0; token < kTileTokens; token += 4) {
            const Halves first = pair_tokens(keys + token), second = pair_tokens(keys + kTileTokens + token);
            std::uint32_t* const to = values + token / 2 * padded_dim + dim;
            store(to, __builtin_shufflevector(first, second, 0, 1, 2, 3, 8, 9, 10, 11));
            store(to + padded_dim, __builtin_shufflevector(first, second, 4, 5, 6, 7, 12, 13, 14, 15));
        }
    turn_pairs(keys, KeyWords(true, 0), kTileTokens, value_dim - dim, padded_dim, values + dim);
}
#else
void turn_full_pairs(const std::uint32_t* keys, int value_dim, int padded_dim, std::uint32_t* values) {
    turn_pairs(keys, KeyWords(true, 0), kTileTokens, value_dim, padded_dim, values);
}
#endif

void turn(const std::uint8_t* keys, int tokens, int lines, int value_dim, int padded_dim, std::uint8_t* values) {
    const std::uint32_t* const words = reinterpret_cast<const std::uint32_t*>(keys);
    std::uint32_t* const to = reinterpret_cast<std::uint32_t*>(values);
    if (tokens == kTileTokens) return turn_full_pairs(words, value_dim, padded_dim, to);
    turn_pairs(words, KeyWords(false, lines), tokens, value_dim, padded_dim, to);
}

}  // namespace

void make_values(DType dtype, const HeadView& view, std::int64_t begin, std::int64_t end, int key_dim, int value_dim) {
    constexpr std::int64_t split_tiles = kSplitTokens / kTileTokens;
    const std::int64_t within_block = (std::int64_t(1) << view.log2_tiles_per_block) - 1;
    const int padded_dim = (value_dim + 15) / 16 * 16, lines = dtype == DType::bfloat16 ? (key_dim + 1) / 2 : key_dim;
    for (std::int64_t tile = begin / kTileTokens; tile * kTileTokens < end; ++tile) {
        const std::uint8_t* const keys = view.base +
                                         view.blocks[tile >> view.log2_tiles_per_block] * view.block_stride_bytes +
                                         (tile & within_block) * view.key_tile_bytes;
        std::uint8_t* const values = view.split_values + tile % split_tiles * view.value_tile_bytes;
        const int tokens = int(std::min<std::int64_t>(end - tile * kTileTokens, kTileTokens));
        const KeyWords at(tokens == kTileTokens, lines);
        if (dtype == DType::bfloat16)
            turn(keys, tokens, lines, value_dim, padded_dim, values);
        else if (dtype == DType::float16)
            turn_tile(reinterpret_cast<const std::uint16_t*>(keys), at, tokens, value_dim, padded_dim,
                      reinterpret_cast<std::uint16_t*>(values));
        else
            turn_tile(reinterpret_cast<const std::uint32_t*>(keys), at, tokens, value_dim, padded_dim,
                      reinterpret_cast<std::uint32_t*>(values));
    }
}

HeadView read_split(const Kernels& kernels, const LayerSpec& layer, DType stored, DType model_dtype,
                    const NextTokens& tokens, std::uint8_t* memory) {
    static constexpr std::int32_t first_block = 0;
    const LayerLayout layout(layer, model_dtype, kSplitTokens, 0);
    const std::int64_t first_tile = tokens.begin / kSplitTokens * kSplitTokens / kTileTokens;
    HeadView view{};
    // One block for all tiles up to the split's last; only the tiles of the split are filled.
    view.base = reinterpret_cast<std::uint8_t*>(reinterpret_cast<std::uintptr_t>(memory) -
                                                std::uintptr_t(first_tile * layout.key_tile_bytes));
    view.blocks = &first_block;
    view.log2_tiles_per_block = 62;
    view.key_tile_bytes = layout.key_tile_bytes, view.value_tile_bytes = layout.value_tile_bytes;
    view.split_values = memory + layout.head_bytes;
    kernels.read_latents[int(stored) - int(DType::int8)]({
        .rows = tokens.view,
        .tiles = view,
        .dtype = model_dtype,
        .begin = tokens.begin / kTileTokens * kTileTokens,
        .end = tokens.end,
        .key_dim = int(layer.key_dim),
        .latent_dim = int(layer.value_dim),
    });
    return view;
}

std::int64_t most_split_bytes(const KVCache& cache, DType model_dtype) {
    std::int64_t most = 0;
    for (const LayerSpec& layer : cache.layers()) {
        const bool has_codes = has_latent_codes(layer, cache.dtype());
        const LayerLayout layout(layer, has_codes ? model_dtype : cache.dtype(), kSplitTokens, 0);
        const std::int64_t values = kSplitTokens / kTileTokens * layout.value_tile_bytes;
        if (layer.values_in_keys()) most = std::max(most, (has_codes ? layout.head_bytes : 0) + values + 64);
    }
    return most;
}

}  // namespace rworker
