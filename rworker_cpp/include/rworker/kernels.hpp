// The border to the kernels: plain structs and one function table per instruction set.
//
// Kernel files see this header and nothing of the standard library but its integer types: a template or inline
// function compiled there would be a weak symbol full of AVX-512, which the linker may keep for every instruction set.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace rworker {

enum class DType : int { float32 = 0, float16 = 1, bfloat16 = 2, int8 = 3, int4 = 4 };  // the last two of caches only

constexpr bool is_quantized(DType dtype) { return dtype == DType::int8 || dtype == DType::int4; }

/// Whether keys and values are rotated before they are stored: kernels/rotate.hpp.
constexpr bool is_rotated(DType dtype) { return dtype == DType::int4; }

constexpr int kTileTokens = 16;   // tokens whose keys lie side by side in one tile
constexpr int kChunkTokens = 64;      // tokens scored before each step of the online softmax
constexpr int kMaxChunkTokens = 128;  // of codes, where sums have room for as many
constexpr int kSplitTokens =
    512;  // a sequence is cut here, always at multiples, so that results do not depend on who else runs
constexpr int kBlockRows = 64;  // query rows that pass over a split together
constexpr int kMaxHeadDim = 1088;  // of latent rows: 1,024 dims and 64 that are rotated
constexpr int kMaxQuantizedHeadDim = 512;  // integer sums of more products could overflow
constexpr int kStreams = 8;  // pages read side by side where memory is scattered
constexpr int kGroupDims = 64;  // dims of a token and head that share an int4 scale and zero
constexpr int kFifthBitDims = 32;  // dims of an int4 key whose codes' fifth bits share a word

/// Whether bytes multiply codes, where they can, for a KV head of so many query heads: for fewer int8 codes are read
/// no slower by 16 bits.
constexpr bool is_for_bytes(DType dtype, int64_t group) {
    return dtype == DType::int4 || (dtype == DType::int8 && group >= 4);
}

/// How attention asks for the tokens it reads next, which changes speed and no result: in one ascending run, into the
/// first-level cache or only into the second; or kStreams pages side by side. Each is the fastest on some processor.
enum class ReadAhead : int { run, run_l2, pages };

constexpr int64_t groups_of(int64_t dim) { return (dim + kGroupDims - 1) / kGroupDims; }

/// Words before the nibbles of one token's int4 key: scale and zero of each group, then the codes' fifth bits.
constexpr int64_t key_words_of(int64_t dim) { return groups_of(dim) + (dim + kFifthBitDims - 1) / kFifthBitDims; }

/// Keys and values of one sequence in one layer and KV head, through its block table. The keys of the last tile, until
/// it is full, are rows; see layout.hpp.
struct HeadView {
    uint8_t* base;          // block 0 of this layer and head
    const int32_t* blocks;  // block ids of the sequence
    int64_t block_stride_bytes;
    int64_t values_offset_bytes;  // from a block's keys to its values
    int64_t key_tile_bytes, value_tile_bytes;
    int log2_tiles_per_block;
    uint8_t* split_values = nullptr;  // if given, where the values of the split's tiles lie, in place of their blocks
};

/// Store tokens [begin, end): rows of `key_dim` and `value_dim` elements of `dtype`, `*_stride` elements apart. A tile
/// that is full with them, or that they end in, is in order afterwards.
struct AppendArgs {
    HeadView view;
    DType dtype;
    const void *keys, *values;
    int64_t key_stride, value_stride;
    int64_t begin, end;
    int key_dim, value_dim;
    int latent_dim = 0;  // dims of the keys that are the values, too; none of those that are stored then
    bool keep_rows = false;  // full tiles stay rows
};

/// Make rows of latent codes of tokens [begin, end) tiles of `dtype`, keys and values: begin is a tile's first.
struct LatentArgs {
    HeadView rows, tiles;
    DType dtype;
    int64_t begin, end;
    int key_dim, latent_dim;
};

/// Floats of a thread's scratch before those of the keys of an unfilled tile.
constexpr int64_t open_tile_offset(int64_t key_dim) {
    return kBlockRows * ((key_dim + 15) / 16 * 16 + kMaxChunkTokens);
}

/// Where a kernel of tile registers keeps what, in floats from a multiple of 64 bytes on. Its chunks are longer, so
/// that eight streams of the next one are pages; longer still where a token has fewer bytes.
struct TileScratch {
    int chunk_tokens;
    int64_t score_stride, scores, weights, outputs, sums, open_keys, key_tails, values, end;  // queries lie at 0

    constexpr TileScratch(DType dtype, int64_t key_dim, int64_t value_dim)
        : chunk_tokens((key_dim + value_dim) * (is_quantized(dtype) ? 1 : 2) <= 320 ? 256 : 128) {
        const int64_t query = (key_dim + 63) / 64 * 32, values16 = (value_dim + 15) / 16 * 16;  // two bytes to a dim
        score_stride = chunk_tokens + 16;
        scores = kBlockRows * query;
        weights = scores + kBlockRows * score_stride;
        outputs = weights + kBlockRows * chunk_tokens / 2;
        sums = outputs + kBlockRows * values16;
        open_keys = sums + kBlockRows * 16;
        key_tails = open_keys + kTileTokens * (query + key_words_of(key_dim));
        values = key_tails + 4 * 256 * groups_of(key_dim);
        end = values + chunk_tokens * values16 / 2;
    }
};

/// Floats a thread lends to attend and merge.
constexpr int64_t scratch_floats(int64_t key_dim, int64_t value_dim) {
    const int64_t open_tile = kTileTokens * ((key_dim + 15) / 16 * 16 + key_words_of(key_dim));
    const int64_t attend = open_tile_offset(key_dim) + open_tile, values = (value_dim + 15) / 16 * 16;
    const int64_t most = attend > values ? attend : values;
    const int64_t tiles = 16 + TileScratch(DType::int8, key_dim, value_dim).end;  // the longer chunks
    return most > tiles ? most : tiles;
}

/// Floats before the output of a partial result: max, sum, and padding to a cache line.
inline constexpr int64_t kPartialHead = 16;

/// Floats of the partial result of one query row: its head, then o[value_dim rounded up to 16].
constexpr int64_t partial_floats(int64_t value_dim) { return kPartialHead + (value_dim + 15) / 16 * 16; }

/// Floats of one partial result as it travels: max, sum, o[value_dim].
constexpr int64_t node_floats(int64_t value_dim) { return 2 + value_dim; }

/// A new token, which brings `group` query rows to each KV head.
struct TokenRow {
    int64_t position;
    int32_t payload_row;  // in q and out
    int32_t span;         // for the count of what is finished
    int64_t partials;     // index of its partial result in split 0, which it may not have; then come the next splits'
    int64_t first_seen;   // it sees the tokens from this one to its own
};

/// Tokens [begin, end) whose keys and values will be wanted next.
struct NextTokens {
    HeadView view;
    int64_t begin, end;
};

/// Attend the query rows of some tokens to one split of the keys and values, writing partial results. All sequences
/// among the rows hold the same blocks there. Query of (token, head) is queries[payload_row * token_stride + head *
/// key_dim]; its partial result is at partials + (its index + split) * partial_stride + head * partial_floats.
struct AttendArgs {
    HeadView view;
    DType dtype;
    const void* queries;
    const TokenRow* tokens;
    int64_t num_tokens, token_stride;  // stride in elements
    int group;
    int64_t split, end;  // tokens from split * kSplitTokens to end, which is the split's or the sequence's
    float scale, soft_cap;
    const float* alibi_slopes;  // [group], or null; see types.hpp
    int key_dim, value_dim;
    float* partials;
    int64_t partial_stride;
    const NextTokens* next;  // asked for while the last chunk is used; or null
    ReadAhead read_ahead;
    float* scratch;
    int64_t pick_block = 0;  // of `score` alone; see types.hpp
};

/// Floats of the scores of one query in one split, for an index layer of `num_heads`; see types.hpp.
constexpr int64_t score_floats(int64_t num_heads, int64_t pick_block) {
    return pick_block == 0 ? kSplitTokens : (num_heads * (kSplitTokens / pick_block) + 15) / 16 * 16;
}

/// Fold the partials of all splits of one (span, KV head) in the tree of merge.hpp, in place, add the sinks and write
/// rows of `dtype`: (token, head) to out[token * token_stride + head * value_dim]. Where `nodes` is given write instead
/// what is left of the tree after its last split, n nodes as floats: (token, node, head) to
/// nodes[(token * n + node) * node_stride + head * node_floats].
struct MergeArgs {
    float* partials;
    int64_t first_split, num_splits, partial_stride;  // of a token; the next token's follow
    int64_t num_tokens, token_stride;
    int group, value_dim;
    const float* sinks;  // [group], or null
    DType dtype;
    void* out;
    float* scratch;
    float* nodes = nullptr;
    int64_t node_stride = 0;
};

/// Nodes of one range: (row, head) at data[row * row_stride + head * node_floats]; `width` splits from `start` on.
struct RangePart {
    const float* data;
    int64_t row_stride, start, width;
};

/// Fold the parts of a sequence, which follow one another, as `merge` folds splits, and write rows as it does: (row,
/// head) to out[(row * num_heads + head) * value_dim].
struct CombineArgs {
    const RangePart* parts;
    int64_t num_parts, num_rows;
    int num_heads, value_dim;
    const float* sinks;  // [num_heads], or null
    DType dtype;
    void* out;
    float* scratch;  // (num_parts + 1) * partial_floats
};

constexpr int kProductRows = 12;  // most that are multiplied together

/// out[row][j] = the sum over i of in[row][i] * weights[i][j], in float32, rounded once. Strides in elements.
struct HeadProductArgs {
    DType dtype;          // of the weights
    const void* weights;  // [tile of 16 outputs][in_dim][16], zeros behind the last output
    DType in_dtype, out_dtype;
    const void* in;
    void* out;
    int64_t in_stride, out_stride, num_rows;
    int in_dim, out_dim;
    float* scratch;  // product_scratch_floats
};

constexpr int64_t product_scratch_floats(int64_t in_dim, int64_t out_dim) {
    return kProductRows * ((in_dim + 15) / 16 * 16 + (out_dim + 15) / 16 * 16);
}

/// One instruction set's functions; append and attend are indexed by the dtype of the cache. Behind those of append,
/// and in read_latents, stand those of latent rows in int8 and int4.
struct Kernels {
    const char* isa;
    void (*append[7])(const AppendArgs&);
    void (*attend[5])(const AttendArgs&);
    // Scores of an index layer, by its `group` heads: at partials + (token's index + split) * partial_stride those of the
    // split's tokens, or [head][block of pick_block tokens] their maxima. What lies behind `end` has any score.
    void (*score[3])(const AttendArgs&);
    void (*merge)(const MergeArgs&);
    void (*combine)(const CombineArgs&);
    // Sums, to measure bandwidth.
    float (*read)(const float* data, int64_t count, bool ask);  // count % 256 == 0
    // count % kStreams == 0; read_ahead is null where nothing is asked for
    float (*read_pages)(const uint8_t* const* pages, int64_t count, int64_t page_bytes, const ReadAhead* read_ahead);
    void (*read_latents[2])(const LatentArgs&);
    void (*multiply_by_head)(const HeadProductArgs&);
    // Scores of single tokens, capped and sloped: of row r, (token, head), with token t at partials[r * partial_stride + t].
    // Tokens that it does not see have what was there. value_dim is 0.
    void (*see[5])(const AttendArgs&);
    // Of scores, 16 or a multiple; exponentiate makes each exp(score - max), where none is above max.
    float (*largest)(const float* scores, int64_t count);
    void (*exponentiate)(float* scores, int64_t count, float max);
    void (*release)() = nullptr;  // registers that attend keeps; before a thread idles. Null: there are none
};

/// What a further instruction does better than the set it builds on; null where that one's functions stay.
struct Refinement {
    const char* isa;
    void (*attend[5])(const AttendArgs&);
    void (*release)() = nullptr;
    void (*score[3])(const AttendArgs&) = {};
};

extern const Kernels kScalarKernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
extern const Kernels kNeonKernels;
extern const Refinement kAvx2Bytes;        // of avx2
extern const Refinement kAvx512Vnni;       // of avx512
extern const Refinement kAvx512VnniBytes;  // of what kAvx512Vnni makes of it
extern const Refinement kAvx512Bf16;       // of avx512_vnni
extern const Refinement kAvx512Amx;        // of avx512_bf16
extern const Refinement kNeonDot;          // of neon
extern const Refinement kNeonBf16;         // of neon_dot

}  // namespace rworker
