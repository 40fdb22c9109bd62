// How recurrent layers read rows and windows, over any Lanes: the convolution, and prefetches meanwhile.
#pragma once

#include "kernels/math.hpp"
#include "kernels/rows.hpp"
#include "rworker/state_kernels.hpp"

namespace {

using rworker::StateArgs;
using rworker::StateChannels;
using rworker::Stretch;

/// x * sigmoid(x); e^-|x| avoids overflow.
template <class L>
inline typename L::vec silu(typename L::vec x) {
    const typename L::vec e = exp_nonpositive_one<L>(L::sub(L::set1(0.0f), L::abs(x))), one = L::set1(1.0f);
    const typename L::vec top = L::if_less(x, L::set1(0.0f), e, one);
    return L::mul(x, L::div(top, L::add(one, e)));
}

/// Prefetches what the next call reads, line by line in the order of memory, spread evenly over the work of this one.
/// The hardware's prefetcher follows this order. Loops use a copy, so that it stays in registers.
class Ahead {
  public:
    explicit Ahead(const StateArgs& args)
        : stretch_(args.next_reads), end_(args.num_rows == 1 ? stretch_ + args.num_next_reads : stretch_),
          end_of_all_(stretch_ + args.num_next_reads) {
        begin_stretch();
    }
    Ahead(const Stretch* stretches, int count) : stretch_(stretches), end_(stretches + count), end_of_all_(end_) {
        begin_stretch();
    }

    int num_lines() const {
        int64_t lines = 0;
        for (const Stretch* each = stretch_; each < end_; ++each) lines += (each->bytes + 63) / 64;
        return int(lines);
    }

    /// Begins to prefetch. Of several tokens, only the last one calls it.
    void begin() {
        if (end_ == end_of_all_) return;
        end_ = end_of_all_;
        begin_stretch();
    }

    [[gnu::always_inline]] void ask(int lines) {
        for (; lines > 0 && line_ < last_; --lines) {
            __builtin_prefetch(line_, 0, 2);
            if ((line_ += 64) >= last_) ++stretch_, begin_stretch();
        }
    }

  private:
    [[gnu::always_inline]] void begin_stretch() {
        if (stretch_ == end_) return;
        line_ = stretch_->first;
        last_ = line_ + stretch_->bytes;
    }

    const Stretch *stretch_, *end_, *end_of_all_;
    const uint8_t *line_ = nullptr, *last_ = nullptr;
};

/// A row of the payload.
inline const uint8_t* row_of(const StateArgs& args, int64_t row) {
    const bool is_earlier = row < args.num_earlier;
    const int64_t index = is_earlier ? row : row - args.num_earlier;
    return static_cast<const uint8_t*>(element(args.dtype, is_earlier ? args.earlier : args.rows, index * args.row_stride));
}

/// Multiplies [0, dim16) by `scale`; where `norm`, scales it to that length.
template <class L>
void scale_row(float scale, bool norm, float* made, int dim16) {
    if (norm) {
        typename L::vec sum = L::set1(0.0f);
        for (int i = 0; i < dim16; i += L::width) sum = L::fma(L::load(made + i), L::load(made + i), sum);
        scale /= __builtin_sqrtf(L::reduce_add(sum) + 1e-6f);
    }
    for (int i = 0; i < dim16; i += L::width) L::store(made + i, L::mul(L::load(made + i), L::set1(scale)));
}

/// One part's inputs of the last `taps` tokens, [token % taps][dim16], and the convolution's result.
template <class L>
struct Convolved {
    const StateArgs& args;
    const StateChannels& part;
    Ahead& asked;
    int dim16;
    float *history, *out;

    Convolved(const StateArgs& all, const StateChannels& channels, Ahead& asks, float*& scratch)
        : args(all), part(channels), asked(asks), dim16(round_up16(channels.dim)), history(scratch) {
        out = history + args.taps * dim16;
        scratch = out + dim16;
        Ahead ahead = asked;
        const int rows_of = (part.dim + args.row_floats - 1) / args.row_floats;
        for (int64_t p = args.position - args.taps + 1; p < args.position; ++p) {
            float* const to = history + (p + args.taps) % args.taps * dim16;
            if (p < 0) {
                for (int i = 0; i < dim16; ++i) to[i] = 0.0f;
                continue;
            }
            float* const* const rows = part.window + p % (args.taps - 1) * rows_of;
            for (int row = 0, i = 0; row < rows_of; ++row)
                for (int c = 0; c < args.row_floats && i < dim16; c += L::width, i += L::width) {
                    ahead.ask(1);
                    L::store(to + i, L::load(rows[row] + c));
                }
        }
        asked = ahead;
    }

    void take(int64_t row) const { take(row, out); }

    void take(int64_t row, float* to) const {
        const int64_t position = args.position + row;
        const int here = int(position % args.taps);
        widen_row<L>(args.dtype, inputs_of(row), part.dim, 1.0f, history + here * dim16);
        if (row + kRowsAhead < args.num_rows) ask_for(row + kRowsAhead);
        const float* inputs[16];
        for (int tap = 0, at = here; tap < args.taps; ++tap) {
            if (++at == args.taps) at = 0;
            inputs[tap] = history + at * dim16;
        }
        args.taps == 4 ? convolve<4>(inputs, to) : convolve<0>(inputs, to);
        for (int i = part.dim; i < dim16; ++i) to[i] = 0.0f;
    }

  private:
    static constexpr int kRowsAhead = 4;  // rows of a prompt are too far apart for the hardware's prefetcher

    const uint8_t* inputs_of(int64_t row) const {
        return static_cast<const uint8_t*>(element(args.dtype, row_of(args, row), part.first_channel));
    }

    void ask_for(int64_t row) const {
        const uint8_t* const first = inputs_of(row);
        for (int64_t i = 0; i < part.dim * item_bytes(args.dtype); i += 64) __builtin_prefetch(first + i);
    }

    /// `Taps`: the number of taps, or 0 for any. `inputs`: of each tap, the oldest first.
    template <int Taps>
    void convolve(const float* const* inputs, float* to) const {
        const float* const filters = args.filters + part.first_channel;
        const int taps = Taps ? Taps : args.taps;
        Ahead ahead = asked;
        for (int i = 0; i < part.dim; i += L::width) {
            ahead.ask(3);
            typename L::vec sum = L::load(args.bias + part.first_channel + i);
            for (int tap = 0; tap < taps; ++tap)
                sum = L::fma(L::load(filters + tap * args.channels + i), L::load(inputs[tap] + i), sum);
            L::store(to + i, args.silu ? silu<L>(sum) : sum);
        }
        asked = ahead;
    }
};

inline float number_at(const uint8_t* bytes) {
    float number;
    __builtin_memcpy(&number, bytes, sizeof(number));
    return number;
}

/// Writes a token's outputs, in the model's dtype.
template <class L>
void write_outputs(const StateArgs& args, int64_t row, const float* o) {
    if (row < args.num_earlier) return;
    narrow_row<L>(args.dtype, o, args.value.dim,
                  const_cast<void*>(element(args.dtype, args.out, (row - args.num_earlier) * args.out_stride)));
}

template <class L>
void clear_row(const StateArgs& args, float* row) {
    for (int c = 0; c < args.row_floats; c += L::width) L::store(row + c, L::set1(0.0f));
}

/// Clears the matrix at the beginning of a sequence.
template <class L>
void begin_matrix(const StateArgs& args, int key_dim) {
    for (int i = 0; i < key_dim && args.position == 0; ++i) clear_row<L>(args, args.matrix[i]);
}

}  // namespace
