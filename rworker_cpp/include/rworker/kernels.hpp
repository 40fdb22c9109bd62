// The interface to the kernels: plain structs and one function table per instruction set.
//
// Kernel files include this header, and only integer types of the standard library. A template or inline function that
// is compiled there would be a weak symbol with AVX-512 code, and the linker may keep that symbol for every instruction
// set.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace rworker {

enum class DType : int { float32 = 0, float16 = 1, bfloat16 = 2, int8 = 3, int4 = 4 };  // int8, int4: caches only

constexpr bool is_quantized(DType dtype) { return dtype == DType::int8 || dtype == DType::int4; }

/// True where keys and values are rotated before they are stored: kernels/rotate.hpp.
constexpr bool is_rotated(DType dtype) { return dtype == DType::int4; }

constexpr int kTileTokens = 16;   // tokens whose keys lie side by side in one tile
constexpr int kChunkTokens = 64;      // tokens scored before each step of the online softmax
constexpr int kMaxChunkTokens = 128;  // chunk of integer codes, whose sums have room for this many tokens
constexpr int kSplitTokens =
    512;  // sequences are cut at multiples of this, so that results do not depend on other sequences
constexpr int kBlockRows = 64;  // query rows that read a split together
constexpr int kMaxHeadDim = 1088;  // the longest rows are latent: 1,024 dims and 64 rotated ones
constexpr int kMaxQuantizedHeadDim = 512;  // integer sums of more products could overflow
constexpr int kStreams = 8;  // pages read side by side where memory is scattered
constexpr int kGroupDims = 64;  // dims of a token and head that share an int4 scale and zero
constexpr int kFifthBitDims = 32;  // dims of an int4 key whose codes' fifth bits share a word

/// True where kernels that multiply bytes pay off for a KV head of `group` query heads. For smaller groups, reading
/// int8 codes as 16-bit numbers is as fast.
constexpr bool is_for_bytes(DType dtype, int64_t group) {
    return dtype == DType::int4 || (dtype == DType::int8 && group >= 4);
}

/// How attention prefetches the tokens that it reads next; it changes speed and never a result. `run`: one ascending
/// run into the first-level cache; `run_l2`: only into the second; `pages`: kStreams pages in parallel. Each is the
/// fastest on some processor.
enum class ReadAhead : int { run, run_l2, pages };

constexpr int64_t groups_of(int64_t dim) { return (dim + kGroupDims - 1) / kGroupDims; }

/// Words before the nibbles of one token's int4 key: scale and zero of each group, then the fifth bits of the codes.
constexpr int64_t key_words_of(int64_t dim) { return groups_of(dim) + (dim + kFifthBitDims - 1) / kFifthBitDims; }

/// Keys and values of one sequence in one layer and KV head, found through its block table. The keys of the last tile
/// are rows until the tile is full; see layout.hpp.
struct HeadView {
    uint8_t* base;          // block 0 of this layer and head
    const int32_t* blocks;  // block ids of the sequence
    int64_t block_stride_bytes;
    int64_t values_offset_bytes;  // distance from a block's keys to its values
    int64_t key_tile_bytes, value_tile_bytes;
    int log2_tiles_per_block;
    uint8_t* split_values = nullptr;  // where the values of the split's tiles lie if not in their blocks; or null
};

/// Stores tokens [begin, end): rows of `key_dim` and `value_dim` elements of `dtype`, `*_stride` elements apart.
/// Afterwards, each tile that these tokens fill or end in is complete.
struct AppendArgs {
    HeadView view;
    DType dtype;
    const void *keys, *values;
    int64_t key_stride, value_stride;
    int64_t begin, end;
    int key_dim, value_dim;
    int latent_dim = 0;  // dims of the keys that also serve as values; then no values are stored
    bool keep_rows = false;  // full tiles remain rows
};

/// Turns rows of latent codes of tokens [begin, end) into tiles of `dtype`, keys and values. `begin` is the first token
/// of a tile.
struct LatentArgs {
    HeadView rows, tiles;
    DType dtype;
    int64_t begin, end;
    int key_dim, latent_dim;
};

/// Floats of a thread's scratch before the keys of an unfilled tile.
constexpr int64_t open_tile_offset(int64_t key_dim) {
    return kBlockRows * ((key_dim + 15) / 16 * 16 + kMaxChunkTokens);
}

/// Layout of a tile kernel's scratch: offsets in floats from a multiple of 64 bytes. Chunks are longer than in other
/// kernels, so that each of the eight streams that prefetch the next chunk reads a page; fewer bytes per token make
/// them longer still.
struct TileScratch {
    int chunk_tokens;
    int64_t score_stride, scores, weights, outputs, sums, open_keys, key_tails, values, end;  // queries are at 0

    constexpr TileScratch(DType dtype, int64_t key_dim, int64_t value_dim)
        : chunk_tokens((key_dim + value_dim) * (is_quantized(dtype) ? 1 : 2) <= 320 ? 256 : 128) {
        const int64_t query = (key_dim + 63) / 64 * 32, values16 = (value_dim + 15) / 16 * 16;  // two bytes per dim
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

/// Floats of scratch that a thread gives to attend and merge.
constexpr int64_t scratch_floats(int64_t key_dim, int64_t value_dim) {
    const int64_t open_tile = kTileTokens * ((key_dim + 15) / 16 * 16 + key_words_of(key_dim));
    const int64_t attend = open_tile_offset(key_dim) + open_tile, values = (value_dim + 15) / 16 * 16;
    const int64_t most = attend > values ? attend : values;
    const int64_t tiles = 16 + TileScratch(DType::int8, key_dim, value_dim).end;  // int8 has the longest chunks
    return most > tiles ? most : tiles;
}

/// Floats before the output of a partial result: max, sum, and padding to a cache line.
inline constexpr int64_t kPartialHead = 16;

/// Floats of the partial result of one query row: its head, then o[value_dim rounded up to 16].
constexpr int64_t partial_floats(int64_t value_dim) { return kPartialHead + (value_dim + 15) / 16 * 16; }

/// Floats of one partial result as it is sent: max, sum, o[value_dim].
constexpr int64_t node_floats(int64_t value_dim) { return 2 + value_dim; }

/// A new token, with `group` query rows for each KV head.
struct TokenRow {
    int64_t position;
    int32_t payload_row;  // in q and out
    int32_t span;         // index of the token's span, whose finished pieces are counted
    int64_t partials;     // index of its partial result in split 0, whether or not it has one; the next splits follow
    int64_t first_seen;   // it sees the tokens from this one up to itself
};

/// Tokens [begin, end) whose keys and values are read next.
struct NextTokens {
    HeadView view;
    int64_t begin, end;
};

/// Computes attention of the query rows of some tokens over one split of keys and values, and writes partial results.
/// All sequences of these rows hold the same blocks in the split. The query of (token, head) is queries[payload_row *
/// token_stride + head * key_dim]. Its partial result is at partials + (its index + split) * partial_stride + head *
/// partial_floats.
struct AttendArgs {
    HeadView view;
    DType dtype;
    const void* queries;
    const TokenRow* tokens;
    int64_t num_tokens, token_stride;  // stride in elements
    int group;
    int64_t split, end;  // tokens from split * kSplitTokens to `end`, the end of the split or of the sequence
    float scale, soft_cap;
    const float* alibi_slopes;  // [group], or null; see types.hpp
    int key_dim, value_dim;
    float* partials;
    int64_t partial_stride;
    const NextTokens* next;  // prefetched while the last chunk is used; or null
    ReadAhead read_ahead;
    float* scratch;
    int64_t pick_block = 0;  // used by `score` only; see types.hpp
};

/// Floats of the scores of one query in one split, for an index layer of `num_heads`; see types.hpp.
constexpr int64_t score_floats(int64_t num_heads, int64_t pick_block) {
    return pick_block == 0 ? kSplitTokens : (num_heads * (kSplitTokens / pick_block) + 15) / 16 * 16;
}

/// Merges the partial results of all splits of one (span, KV head) in the tree of merge.hpp, in place. It adds the
/// sinks and writes rows of `dtype`: (token, head) to out[token * token_stride + head * value_dim]. Where `nodes` is
/// given, it instead writes the n nodes that the tree has after its last split, as floats: (token, node, head) to
/// nodes[(token * n + node) * node_stride + head * node_floats].
struct MergeArgs {
    float* partials;
    int64_t first_split, num_splits, partial_stride;  // of one token; those of the next token follow
    int64_t num_tokens, token_stride;
    int group, value_dim;
    const float* sinks;  // [group], or null
    DType dtype;
    void* out;
    float* scratch;
    float* nodes = nullptr;
    int64_t node_stride = 0;
};

/// Nodes of one range: (row, head) is at data[row * row_stride + head * node_floats]. They cover `width` splits from
/// `start` on.
struct RangePart {
    const float* data;
    int64_t row_stride, start, width;
};

/// Merges consecutive parts of a sequence as `merge` merges splits, and writes rows in the same form: (row, head) to
/// out[(row * num_heads + head) * value_dim].
struct CombineArgs {
    const RangePart* parts;
    int64_t num_parts, num_rows;
    int num_heads, value_dim;
    const float* sinks;  // [num_heads], or null
    DType dtype;
    void* out;
    float* scratch;  // (num_parts + 1) * partial_floats
};

constexpr int kProductRows = 12;  // most rows that are multiplied together

/// Computes out[row][j] = the sum over i of in[row][i] * weights[i][j], in float32, rounded once. Strides count
/// elements.
struct HeadProductArgs {
    DType dtype;          // of the weights
    const void* weights;  // [tile of 16 outputs][in_dim][16], with zeros after the last output
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

/// The functions of one instruction set. append and attend are indexed by the dtype of the cache. After them, in append
/// and read_latents, come those for latent rows in int8 and int4.
struct Kernels {
    const char* isa;
    void (*append[7])(const AppendArgs&);
    void (*attend[5])(const AttendArgs&);
    // Computes scores of an index layer from its `group` heads. At partials + (token's index + split) * partial_stride
    // it writes the scores of the split's tokens, or their maxima: [head][block of pick_block tokens]. Scores after
    // `end` are undefined.
    void (*score[3])(const AttendArgs&);
    void (*merge)(const MergeArgs&);
    void (*combine)(const CombineArgs&);
    // Returns a sum, to measure bandwidth.
    float (*read)(const float* data, int64_t count, bool ask);  // count % 256 == 0
    // count % kStreams == 0; read_ahead is null where nothing is prefetched
    float (*read_pages)(const uint8_t* const* pages, int64_t count, int64_t page_bytes, const ReadAhead* read_ahead);
    void (*read_latents[2])(const LatentArgs&);
    void (*multiply_by_head)(const HeadProductArgs&);
    // Computes scores of single tokens, with cap and slope. Of row r, the score of (token, head) with token t is at
    // partials[r * partial_stride + t]. Tokens that the row does not see are left unchanged. value_dim is 0.
    void (*see[5])(const AttendArgs&);
    // `largest` returns the maximum of `count` scores, a multiple of 16. `exponentiate` replaces each by exp(score -
    // max), where none is above max.
    float (*largest)(const float* scores, int64_t count);
    void (*exponentiate)(float* scores, int64_t count, float max);
    void (*release)() = nullptr;  // frees registers that attend keeps, before a thread idles; null: there are none
};

/// Functions that an additional instruction speeds up. Null: the base set's function stays.
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
extern const Refinement kAvx2Bytes;        // extends avx2
extern const Refinement kAvx512Vnni;       // extends avx512
extern const Refinement kAvx512VnniBytes;  // extends the result of kAvx512Vnni
extern const Refinement kAvx512Bf16;       // extends avx512_vnni
extern const Refinement kAvx512Amx;        // extends avx512_bf16
extern const Refinement kNeonDot;          // extends neon
extern const Refinement kNeonBf16;         // extends neon_dot

}  // namespace rworker
