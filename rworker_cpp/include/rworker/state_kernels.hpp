// The border to the kernels of recurrent layers: like kernels.hpp, without the standard library.
#pragma once

#include "rworker/kernels.hpp"

namespace rworker {

/// Channels [first_channel, first_channel + dim) of each row, and the earlier inputs of their convolution: that of token
/// p in the rows from window[p % (taps - 1) * rows_of(dim)] on.
struct StateChannels {
    int64_t first_channel;
    int dim;
    float* const* window;
};

/// Bytes of memory that lie one after another.
struct Stretch {
    const uint8_t* first;
    int64_t bytes;
};

/// What becomes of a head's matrix; see state_spec.hpp.
enum class Recurrence : int { none, delta, scan, selective, lru };

/// The tokens of one sequence, `num_rows` after `position` earlier ones, in one layer and head.
/// What is read of windows is left as it is.
struct StateArgs {
    DType dtype;
    const void* rows;
    int64_t row_stride, num_rows, position;  // stride in elements
    const void* earlier;                     // delta, scan: the first `num_earlier` of the rows, whose outputs are known;
    int64_t num_earlier, num_taken;          // what is written is the state after `num_taken` rows: all, or at most a batch
    Recurrence recurrence;
    StateChannels query, key, value;         // of dim 0 where there is none
    const float* filters;                    // [taps][channels], and 16 floats more
    const float* bias;                       // [channels] and 16 more
    int64_t channels;
    int taps;
    bool silu, norm;
    int64_t first_decay, first_rate;  // bytes from a row's begin
    int decays;
    const float* factors;  // of the head's first channel, [key_dim] rows `factor_stride` apart, readable up to a whole 16
    int64_t factor_stride;
    float scale, skip;
    float* const* matrix;       // [key_dim] rows, of elements of state_dtype
    const Stretch* next_reads;  // what the call that follows reads, its inputs first: asked for meanwhile
    int num_next_reads, num_next_inputs;
    int row_floats;        // that a row of the state has room for
    DType state_dtype;     // of matrices
    void* out;
    int64_t out_stride;
    float* scratch;
    float* shared;  // delta, scan: [num_rows][query and key, each of round_up16(key_dim)]; of a lone row, one
    bool shares;    // what belongs in `shared` is there already

    // Of a lone row, which does not need `matrix`:
    const Stretch* pieces;  // of the matrix, whole rows one after another
    float* values;          // [round_up16(value_dim)]
    bool made;              // values and `shared` are there already: it was `next`
    const StateArgs* next;  // a lone row whose values and `shared` are made meanwhile; or null
    // The last of the earlier rows, as it was kept when it was a lone one: its key, and what the matrix takes by that; it
    // takes it now. Null: the matrix has all earlier rows.
    const float *earlier_key, *earlier_taken;
    float *coming_key, *coming_taken;  // where those of this row are kept, in place of taking it; or null
};

/// Tokens that go over a strip of a matrix while it is near, and most columns of it.
constexpr int kStateBatch = 32, kStripColumns = 32;

/// Floats that `advance` needs.
constexpr int64_t state_scratch_floats(int64_t key_dim, int64_t value_dim, int64_t taps) {
    const int64_t keys = (key_dim + 15) / 16 * 16, values = (value_dim + 15) / 16 * 16;
    return (taps + 4) * (2 * keys + values) + key_dim * kStripColumns + kStateBatch * (3 * keys + 2 * values);
}

/// And of `shared`.
constexpr int64_t state_shared_floats(int64_t key_dim, int64_t num_rows) {
    return num_rows * 2 * ((key_dim + 15) / 16 * 16);
}

/// Keep the last inputs of a convolution in its window.
struct WindowArgs {
    DType dtype;
    const void* rows;
    int64_t row_stride, num_rows, position;
    StateChannels channels;
    int taps, row_floats;
};

struct StateKernels {
    void (*advance)(const StateArgs&);
    void (*advance_lone)(const StateArgs&);  // delta, scan: one row that attends
    void (*keep)(const WindowArgs&);
};

extern const StateKernels kScalarState;
extern const StateKernels kAvx2State;
extern const StateKernels kAvx512State;
extern const StateKernels kNeonState;

}  // namespace rworker
