// The border to the kernels: plain structs and one function table per instruction set.
//
// Kernel files see this header and nothing of the standard library but its integer types: a template or inline
// function compiled there would be a weak symbol full of AVX-512, which the linker may keep for everyone.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace rworker {

enum class DType : int { float32 = 0, float16 = 1, bfloat16 = 2 };

constexpr int kTileTokens = 16;   // tokens whose keys lie side by side in one tile
constexpr int kChunkTokens = 64;  // tokens scored before each step of the online softmax
constexpr int kSplitTokens =
    512;  // a sequence is cut here, always at multiples, so that results do not depend on who else runs
constexpr int kBlockRows = 32;  // query rows that pass over a split together
constexpr int kMaxHeadDim = 512;

/// Keys and values of one sequence in one layer and KV head, through its block table.
struct HeadView {
    uint8_t* base;          // block 0 of this layer and head
    const int32_t* blocks;  // block ids of the sequence
    int64_t block_stride_bytes;
    int64_t values_offset_bytes;  // from a block's keys to its values
    int64_t key_tile_bytes, value_tile_bytes;
    int log2_tiles_per_block;
};

/// Store tokens [begin, end): rows of `key_dim` and `value_dim` elements of `dtype`, `*_stride` elements apart.
struct AppendArgs {
    HeadView view;
    DType dtype;
    const void *keys, *values;
    int64_t key_stride, value_stride;
    int64_t begin, end;
    int key_dim, value_dim;
};

/// Floats a thread lends to attend and merge.
constexpr int64_t scratch_floats(int64_t key_dim, int64_t value_dim) {
    const int64_t attend = kBlockRows * ((key_dim + 15) / 16 * 16 + kChunkTokens + 1),
                  merge = (value_dim + 15) / 16 * 16;
    return attend > merge ? attend : merge;
}

/// A partial result of `rows` query rows: max[rows], sum[rows], then o[rows][value_dim rounded up to 16].
constexpr int64_t partial_floats(int64_t rows, int64_t value_dim) {
    return (rows * 2 + 15) / 16 * 16 + rows * ((value_dim + 15) / 16 * 16);
}

/// Where the stacked rows of one (span, KV head) lie in q or out. Row r is token r / group, head r % group.
struct RowView {
    int64_t rows;
    int group;
    int64_t token_stride, head_stride;  // elements
};

/// Attend `queries` to the tokens of one split, [begin, end), writing a partial result.
struct AttendArgs {
    HeadView view;
    DType dtype;
    const void* queries;
    RowView rows;
    int64_t first_position;  // of token row 0
    int64_t begin, end;
    int64_t window;  // 0: all
    float scale, soft_cap;
    int key_dim, value_dim;
    float* partial;
    float* scratch;
};

/// Fold the partials of all splits, in order, add the sinks and write rows of `dtype`.
struct MergeArgs {
    const float* partials;
    int64_t num_partials, partial_stride;
    RowView rows;
    int value_dim;
    const float* sinks;  // [group], or null
    DType dtype;
    void* out;
    float* scratch;
};

/// One instruction set's functions; append and attend are indexed by the dtype of the cache.
struct Kernels {
    const char* isa;
    void (*append[3])(const AppendArgs&);
    void (*attend[3])(const AttendArgs&);
    void (*merge)(const MergeArgs&);
    float (*read)(const float* data, int64_t count);  // sums, for measuring read bandwidth; count % 256 == 0
};

extern const Kernels kScalarKernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;

}  // namespace rworker
