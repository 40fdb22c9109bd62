// The interface to the kernels of recurrent layers. Like kernels.hpp, it does not use the standard library.
#pragma once

#include "rworker/kernels.hpp"

namespace rworker {

/// Channels [first_channel, first_channel + dim) of each row, and the earlier inputs of their convolution. The input of
/// token p is in the rows from window[p % (taps - 1) * rows_of(dim)] on.
struct StateChannels {
    int64_t first_channel;
    int dim;
    float* const* window;
};

/// Consecutive bytes of memory.
struct Stretch {
    const uint8_t* first;
    int64_t bytes;
};

/// How a head's matrix is updated; see state_spec.hpp.
enum class Recurrence : int { none, delta, scan, selective, lru };

/// The tokens of one sequence in one layer and head: `num_rows` tokens after `position` earlier ones. Windows are read
/// and not changed.
struct StateArgs {
    DType dtype;
    const void* rows;
    int64_t row_stride, num_rows, position;  // stride in elements
    const void* earlier;                     // delta, scan: the first `num_earlier` rows, whose outputs are known
    int64_t num_earlier, num_taken;          // the state is written after `num_taken` rows: all, or at most a batch
    Recurrence recurrence;
    StateChannels query, key, value;         // of dim 0 where there is none
    const float* filters;                    // [taps][channels], and 16 more floats
    const float* bias;                       // [channels] and 16 more
    int64_t channels;
    int taps;
    bool silu, norm;
    int64_t first_decay, first_rate;  // bytes from a row's begin
    int decays;
    const float* factors;  // of the head's first channel, [key_dim] rows `factor_stride` apart, padded to 16
    int64_t factor_stride;
    float scale, skip;
    float* const* matrix;       // [key_dim] rows of elements of state_dtype
    const Stretch* next_reads;  // what the next call reads, its inputs first; prefetched meanwhile
    int num_next_reads, num_next_inputs;
    int row_floats;        // floats that a row of the state has room for
    DType state_dtype;     // of matrices
    void* out;
    int64_t out_stride;
    float* scratch;
    float* shared;  // delta, scan: [num_rows][query and key, each of round_up16(key_dim)]; for a single row, one
    bool shares;    // `shared` already has its content

    // Used for a single row, which does not need `matrix`:
    const Stretch* pieces;  // whole consecutive rows of the matrix
    float* values;          // [round_up16(value_dim)]
    bool made;              // `values` and `shared` have their content: this head was `next` before
    const StateArgs* next;  // a single row whose values and `shared` are made meanwhile; or null
    // The last of the earlier rows, if it was kept as a single row: its key, and its input of the matrix product. The
    // matrix is updated by it now. Null: the matrix has all earlier rows.
    const float *earlier_key, *earlier_taken;
    float *coming_key, *coming_taken;  // where this row's key and input are kept, in place of an update; or null
};

/// Tokens that are applied to a strip of a matrix while it is in the processor's cache, and most columns of a strip.
constexpr int kStateBatch = 32, kStripColumns = 32;

/// Floats of scratch that `advance` needs.
constexpr int64_t state_scratch_floats(int64_t key_dim, int64_t value_dim, int64_t taps) {
    const int64_t keys = (key_dim + 15) / 16 * 16, values = (value_dim + 15) / 16 * 16;
    return (taps + 4) * (2 * keys + values) + key_dim * kStripColumns + kStateBatch * (3 * keys + 2 * values);
}

/// Floats of `shared`.
constexpr int64_t state_shared_floats(int64_t key_dim, int64_t num_rows) {
    return num_rows * 2 * ((key_dim + 15) / 16 * 16);
}

/// Keeps the last inputs of a convolution in its window.
struct WindowArgs {
    DType dtype;
    const void* rows;
    int64_t row_stride, num_rows, position;
    StateChannels channels;
    int taps, row_floats;
};

struct StateKernels {
    void (*advance)(const StateArgs&);
    void (*advance_lone)(const StateArgs&);  // delta, scan: one row with an output
    void (*keep)(const WindowArgs&);
};

extern const StateKernels kScalarState;
extern const StateKernels kAvx2State;
extern const StateKernels kAvx512State;
extern const StateKernels kNeonState;

}  // namespace rworker
