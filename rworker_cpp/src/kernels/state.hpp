// Recurrent layers: the convolution before them and the update of a head's matrix, over any Lanes.
#pragma once

#include "kernels/math.hpp"
#include "kernels/rows.hpp"
#include "rworker/state_kernels.hpp"

namespace {

using rworker::Recurrence;
using rworker::StateArgs;
using rworker::StateChannels;
using rworker::Stretch;
using rworker::WindowArgs;

/// x * sigmoid(x); e^-|x| keeps it from overflowing.
template <class L>
inline typename L::vec silu(typename L::vec x) {
    const typename L::vec e = exp_nonpositive_one<L>(L::sub(L::set1(0.0f), L::abs(x))), one = L::set1(1.0f);
    const typename L::vec top = L::if_less(x, L::set1(0.0f), e, one);
    return L::mul(x, L::div(top, L::add(one, e)));
}

/// Asks for what the call that follows reads, line by line in the order of memory, evenly over all that is done meanwhile:
/// what else reads ahead follows it. Loops take a copy, so that it stays in registers.
class Ahead {
  public:
    explicit Ahead(const StateArgs& args)
        : stretch_(args.next_reads), end_(args.num_rows == 1 ? stretch_ + args.num_next_reads : stretch_),
          end_of_all_(stretch_ + args.num_next_reads) {
        begin_stretch();
    }

    /// In the last of several tokens.
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

/// One part's inputs of the last `taps` tokens, [token % taps][dim16], and what the convolution makes of them.
template <class L>
struct Convolved {
    const StateArgs& args;
    const StateChannels& part;
    Ahead& asked;
    int dim16;
    float *history, *out;

    /// `shares`: what it makes is there already.
    Convolved(const StateArgs& all, const StateChannels& channels, Ahead& asks, float*& scratch, bool shares = false)
        : args(all), part(channels), asked(asks), dim16(round_up16(channels.dim)), history(scratch) {
        out = history + args.taps * dim16;
        scratch = out + dim16;
        if (shares) return;
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

    void take(int64_t row) const {
        const int64_t position = args.position + row;
        widen_row<L>(args.dtype, element(args.dtype, args.rows, row * args.row_stride + part.first_channel), part.dim, 1.0f,
                     history + position % args.taps * dim16);
        const float *inputs[16], *const filters = args.filters + part.first_channel;
        for (int tap = 0; tap < args.taps; ++tap) inputs[tap] = history + (position + 1 + tap) % args.taps * dim16;
        Ahead ahead = asked;
        for (int i = 0; i < part.dim; i += L::width) {
            ahead.ask(3);
            typename L::vec sum = L::load(args.bias + part.first_channel + i);
            for (int tap = 0; tap < args.taps; ++tap)
                sum = L::fma(L::load(filters + tap * args.channels + i), L::load(inputs[tap] + i), sum);
            L::store(out + i, args.silu ? silu<L>(sum) : sum);
        }
        asked = ahead;
        for (int i = part.dim; i < dim16; ++i) out[i] = 0.0f;
    }

    /// Scales it, to length `scale` where `norm`.
    void scale_by(float scale, bool norm) const {
        if (norm) {
            typename L::vec sum = L::set1(0.0f);
            for (int i = 0; i < dim16; i += L::width) sum = L::fma(L::load(out + i), L::load(out + i), sum);
            scale /= __builtin_sqrtf(L::reduce_add(sum) + 1e-6f);
        }
        for (int i = 0; i < dim16; i += L::width) L::store(out + i, L::mul(L::load(out + i), L::set1(scale)));
    }
};


/// sum += S'x over columns [first, first + N vectors). Rows go in pairs, each with sums of its own, or one would wait
/// for the other.
template <class L, DType D, int N>
[[gnu::always_inline]] inline void add_products(const StateArgs& args, int first, const float* x, typename L::vec (&sum)[N],
                                                int lines, Ahead& ahead) {
    using vec = typename L::vec;
    const int dim = args.key.dim;
    float* const* const rows = args.matrix;
    vec odd[N];
    for (int n = 0; n < N; ++n) odd[n] = L::set1(0.0f);
    int i = 0;
    for (; i + 2 <= dim; i += 2) {
        const void *const row = rows[i], *const other = rows[i + 1];
        ahead.ask(2 * lines);
        const vec here = L::set1(x[i]), there = L::set1(x[i + 1]);
        RWORKER_UNROLL
        for (int n = 0; n < N; ++n) {
            sum[n] = L::fma(here, widen<L, D>(row, first + n * L::width), sum[n]);
            odd[n] = L::fma(there, widen<L, D>(other, first + n * L::width), odd[n]);
        }
    }
    if (i < dim)
        for (int n = 0; n < N; ++n)
            sum[n] = L::fma(L::set1(x[i]), widen<L, D>(args.matrix[i], first + n * L::width), sum[n]);
    for (int n = 0; n < N; ++n) sum[n] = L::add(sum[n], odd[n]);
}

/// What one token does to columns [first, first + N vectors) of a matrix; `o` and `v` have round_up16(value_dim).
/// delta reads the rows twice, the second time from a near cache.
template <class L, DType D, int N, bool Delta>
[[gnu::always_inline]] inline void update(const StateArgs& args, int first, const float* q, const float* k, const float* a,
                                          const float* ak, float rate, const float* v, float* o, Ahead& asked) {
    using vec = typename L::vec;
    constexpr int kBytes = N * L::width * int(item_bytes(D)), kLines = kBytes > 64 ? kBytes / 64 : 1;
    constexpr int kFirst = Delta ? kLines / 2 : 0;
    vec d[N], sum[N];
    Ahead ahead = asked;
    for (int n = 0; n < N; ++n) d[n] = L::load(v + first + n * L::width), sum[n] = L::set1(0.0f);
    if constexpr (Delta) {
        add_products<L, D, N>(args, first, ak, sum, kFirst, ahead);
        for (int n = 0; n < N; ++n) d[n] = L::sub(d[n], sum[n]), sum[n] = L::set1(0.0f);
    }
    alignas(64) float taken[N * L::width];
    for (int n = 0; n < N; ++n) L::store(taken + n * L::width, L::mul(d[n], L::set1(rate)));
    const int dim = args.key.dim;
    float* const* const rows = args.matrix;
    for (int i = 0; i < dim; ++i) {
        void* const row = rows[i];
        ahead.ask(kLines - kFirst);
        const vec key = L::set1(k[i]), decay = L::set1(a[i]), query = L::set1(q[i]);
        RWORKER_UNROLL
        for (int n = 0; n < N; ++n) {
            const vec s = L::fma(key, L::load(taken + n * L::width), L::mul(decay, widen<L, D>(row, first + n * L::width)));
            narrow<L, D>(s, row, first + n * L::width);
            sum[n] = L::fma(query, s, sum[n]);
        }
    }
    for (int n = 0; n < N; ++n) L::store(o + first + n * L::width, sum[n]);
    asked = ahead;
}

inline float number_at(const uint8_t* bytes) {
    float number;
    __builtin_memcpy(&number, bytes, sizeof(number));
    return number;
}

/// A token's outputs, in the model's dtype.
template <class L>
void write_outputs(const StateArgs& args, int64_t row, const float* o) {
    narrow_row<L>(args.dtype, o, args.value.dim,
                  const_cast<void*>(element(args.dtype, args.out, row * args.out_stride)));
}

inline const uint8_t* numbers_of(const StateArgs& args, int64_t row) {
    return static_cast<const uint8_t*>(element(args.dtype, args.rows, row * args.row_stride));
}

/// A sequence begins with a matrix of zeros.
template <class L>
void begin_matrix(const StateArgs& args, int key_dim) {
    for (int i = 0; i < key_dim && args.position == 0; ++i)
        for (int c = 0; c < args.row_floats; c += L::width) L::store(args.matrix[i] + c, L::set1(0.0f));
}

/// `lru`: one row, whose decays the numbers are.
template <class L, DType D>
void advance_lru(const StateArgs& args, const Convolved<L>& value, float* o, float* decays) {
    begin_matrix<L>(args, 1);
    void* const state = args.matrix[0];
    for (int64_t row = 0; row < args.num_rows; ++row) {
        value.take(row);
        widen_row<L>(DType::float32, numbers_of(args, row) + args.first_decay, args.value.dim, 1.0f, decays);
        for (int c = 0; c < value.dim16; c += L::width) {
            const typename L::vec s = L::fma(L::load(decays + c), widen<L, D>(state, c), L::load(value.out + c));
            narrow<L, D>(s, state, c);
            L::store(o + c, s);
        }
        write_outputs<L>(args, row, o);
    }
}

/// `selective`: of each channel its key_dim elements, one below the other.
template <class L, DType D>
void advance_selective(const StateArgs& args, const Convolved<L>& value, float* o, float* scratch, Ahead& ahead) {
    using vec = typename L::vec;
    const Convolved<L> query(args, args.query, ahead, scratch), key(args, args.key, ahead, scratch);
    float* const steps = scratch;
    const int key_dim = args.key.dim;
    begin_matrix<L>(args, key_dim);
    for (int64_t row = 0; row < args.num_rows; ++row) {
        value.take(row), query.take(row), key.take(row);
        widen_row<L>(DType::float32, numbers_of(args, row) + args.first_decay, args.value.dim, 1.0f, steps);
        if (row + 1 == args.num_rows) ahead.begin();
        for (int c = 0; c < value.dim16; c += L::width) {
            const vec step = L::load(steps + c), taken = L::mul(step, L::load(value.out + c));
            vec sum = L::set1(0.0f);
            for (int n = 0; n < key_dim; ++n) {
                if (c % 16 == 0) ahead.ask(1);
                const vec decay = exp_nonpositive_one<L>(L::mul(step, L::load(args.factors + n * args.factor_stride + c)));
                const vec s = L::fma(L::set1(key.out[n]), taken, L::mul(decay, widen<L, D>(args.matrix[n], c)));
                narrow<L, D>(s, args.matrix[n], c);
                sum = L::fma(L::set1(query.out[n]), s, sum);
            }
            L::store(o + c, sum);
        }
        write_outputs<L>(args, row, o);
    }
}

/// `delta` and `scan`. Where the group's query and key are those of the call before, they still lie in the scratch.
template <class L, DType D, bool Delta>
void advance_matrix(const StateArgs& args, const Convolved<L>& value, float* o, float* scratch, Ahead& ahead) {
    const Convolved<L> query(args, args.query, ahead, scratch, args.shares), key(args, args.key, ahead, scratch, args.shares);
    float *const a = scratch, *const ak = a + key.dim16;
    const int dim = args.key.dim;
    begin_matrix<L>(args, dim);
    constexpr int kMost = Delta && L::width == 8 ? 4 : 8;  // delta's first pass has two sums of each, which are to fit the registers
    for (int64_t row = 0; row < args.num_rows; ++row) {
        value.take(row);
        if (!args.shares) {
            query.take(row), key.take(row);
            query.scale_by(args.scale, args.norm), key.scale_by(1.0f, args.norm);
        }
        const uint8_t* const numbers = numbers_of(args, row);
        for (int i = 0; i < args.decays; ++i) a[i] = exp_of_nonpositive<L>(number_at(numbers + args.first_decay + 4 * i));
        for (int i = args.decays; i < dim; ++i) a[i] = a[0];
        for (int i = 0; i < dim; ++i) ak[i] = a[i] * key.out[i];
        const float rate = number_at(numbers + args.first_rate);
        if (row + 1 == args.num_rows) ahead.begin();
        int first = 0;
        const auto go_on = [&]<int N>() {
            for (; first + N * L::width <= value.dim16; first += N * L::width)
                update<L, D, N, Delta>(args, first, query.out, key.out, a, ak, rate, value.out, o, ahead);
        };
        go_on.template operator()<kMost>();
        if constexpr (kMost > 4) go_on.template operator()<4>();
        go_on.template operator()<2>();
        go_on.template operator()<1>();
        if (args.skip != 0.0f)
            for (int i = 0; i < value.dim16; i += L::width)
                L::store(o + i, L::fma(L::set1(args.skip), L::load(value.out + i), L::load(o + i)));
        write_outputs<L>(args, row, o);
    }
}

template <class L, DType D>
void advance_state(const StateArgs& args, const Convolved<L>& value, float* o, float* scratch, Ahead& ahead) {
    if (args.recurrence == Recurrence::delta) return advance_matrix<L, D, true>(args, value, o, scratch, ahead);
    if (args.recurrence == Recurrence::scan) return advance_matrix<L, D, false>(args, value, o, scratch, ahead);
    if (args.recurrence == Recurrence::selective) return advance_selective<L, D>(args, value, o, scratch, ahead);
    advance_lru<L, D>(args, value, o, scratch);
}

template <class L>
void advance(const StateArgs& args) {
    float* scratch = args.scratch;
    Ahead ahead(args);
    const Convolved<L> value(args, args.value, ahead, scratch);
    float* const o = scratch;
    scratch += value.dim16;
    if (args.recurrence != Recurrence::none)
        return with_dtype(args.state_dtype, [&]<DType D>() { advance_state<L, D>(args, value, o, scratch, ahead); });
    for (int64_t row = 0; row < args.num_rows; ++row) {
        value.take(row);
        write_outputs<L>(args, row, value.out);
    }
}

template <class L>
void keep(const WindowArgs& args) {
    const int taps = args.taps - 1, rows_of = (args.channels.dim + args.row_floats - 1) / args.row_floats;
    const int64_t kept = args.num_rows < taps ? args.num_rows : taps;
    for (int64_t row = args.num_rows - kept; row < args.num_rows; ++row)
        for (int i = 0; i < rows_of; ++i) {
            const int first = i * args.row_floats, left = args.channels.dim - first;
            widen_row<L>(args.dtype,
                         element(args.dtype, args.rows, row * args.row_stride + args.channels.first_channel + first),
                         left < args.row_floats ? left : args.row_floats, 1.0f,
                         args.channels.window[(args.position + row) % taps * rows_of + i]);
        }
}

template <class L>
constexpr rworker::StateKernels make_state_kernels() {
    return {advance<L>, keep<L>};
}

}  // namespace
