// A head's matrix and one token with an output, over any Lanes. Passes read the matrix in the order of memory, about a
// page at a time. Between passes, as much of the next head's matrix is prefetched, and its inputs are made. Where the
// token may be undone, the matrix is not updated with it yet. Its update is done in the pass that reads the matrix for
// the next token.
#pragma once

#include "kernels/state_making.hpp"
#include "kernels/state_matrix.hpp"

namespace {

/// Work between the rows of a matrix: prefetching what the next head reads, its inputs first, and making its inputs.
template <class L>
class Beside {
  public:
    Beside(const StateArgs& args, int chunks) : asks_(args.next_reads, args.num_next_reads), making_(args.next) {
        wait_ = chunks / 4;
        const int making = chunks - wait_ > 1 ? chunks - wait_ - 1 : 1;
        lines_ = (asks_.num_lines() + chunks - 1) / chunks;
        vectors_ = (making_.vectors_left() + making - 1) / making;
    }

    void go_on() {
        asks_.ask(lines_);
        if (--wait_ < 0) making_.make(vectors_);
    }
    void finish() { making_.finish(); }

  private:
    Ahead asks_;
    Making<L> making_;
    int wait_, lines_, vectors_;
};

/// An update of a matrix: S <- a S + k t'.
struct Taking {
    const float *k, *a, *t;
};

/// What is read after the update. delta: sum += S'k and out += S'q; scan: out += (a S + k t')'q.
struct Reading {
    const float *k, *q, *a, *t;
    float *sum, *out;
};

/// takes: the matrix is updated by a row; reads: it is read; gives: the outputs come from the matrix before it is
/// rounded.
enum class Pass { takes, reads, takes_reads, takes_gives };

/// N vectors of a constant row, in registers where there are enough.
template <class L, int N>
class Fixed {
  public:
    Fixed(const float* row, int first) : row_(N > 0 ? row + first : row) {
        if constexpr (kHeld)
            for (int n = 0; n < N; ++n) held_[n] = L::load(row_ + n * L::width);
    }

    [[gnu::always_inline]] typename L::vec operator[](int n) const {
        if constexpr (kHeld) return held_[n];
        return L::load(row_ + n * L::width);
    }

  private:
    static constexpr bool kHeld = L::width != 8;  // AVX2 has 16 registers
    const float* row_;
    typename L::vec held_[kHeld && N > 0 ? N : 1];
};

/// Loaded once. gcc would load it for each of two multiply-adds, and the processor would then read less far ahead.
template <class V>
[[gnu::always_inline]] inline void hold([[maybe_unused]] V& vector) {
#ifdef __AVX512F__
    if constexpr (sizeof(V) == 64) asm("" : "+v"(vector));
#elif defined(__AVX2__)
    if constexpr (sizeof(V) == 32) asm("" : "+x"(vector));
#endif
}

/// Rows [begin, end) of N vectors of columns.
template <class L, DType D, bool Delta, Pass P, int N>
[[gnu::always_inline]] inline void pass_columns(float* const* rows, int begin, int end, int first, const Taking& taking,
                                                const Reading& reading) {
    using vec = typename L::vec;
    constexpr bool kTakes = P != Pass::reads, kReads = P == Pass::reads || P == Pass::takes_reads;
    constexpr bool kGives = P == Pass::takes_gives;
    const float *const keys = taking.k, *const decays = taking.a, *const read_keys = reading.k, *const read_decays = reading.a,
                *const queries = reading.q;
    const Fixed<L, kTakes ? N : 0> taken(taking.t, first);
    const Fixed<L, kReads && !Delta ? N : 0> read_taken(reading.t, first);
    vec sum[N], out[N];
    for (int n = 0; n < N; ++n) {
        if constexpr (kReads && Delta) sum[n] = L::load(reading.sum + first + n * L::width);
        if constexpr (kReads || kGives) out[n] = L::load(reading.out + first + n * L::width);
    }
    for (int i = begin; i < end; ++i) {
        void* const row = rows[i - begin];
        vec key, decay, read_key, read_decay, query;
        if constexpr (kTakes) key = L::set1(keys[i]), decay = L::set1(decays[i]);
        if constexpr (kReads) read_key = L::set1(read_keys[i]);
        if constexpr (kReads && !Delta) read_decay = L::set1(read_decays[i]);
        if constexpr (kReads || kGives) query = L::set1(queries[i]);
        RWORKER_UNROLL
        for (int n = 0; n < N; ++n) {
            vec s = widen<L, D>(row, first + n * L::width);
            if constexpr (kTakes) {
                s = L::fma(key, taken[n], L::mul(decay, s));
                narrow<L, D>(s, row, first + n * L::width);
                if constexpr (kGives) out[n] = L::fma(query, s, out[n]);
                if constexpr (D != DType::float32 && kReads) s = widen<L, D>(row, first + n * L::width);
            } else {
                hold(s);
            }
            if constexpr (kReads && Delta) sum[n] = L::fma(read_key, s, sum[n]);
            if constexpr (kReads && !Delta) s = L::fma(read_key, read_taken[n], L::mul(read_decay, s));
            if constexpr (kReads) out[n] = L::fma(query, s, out[n]);
        }
    }
    for (int n = 0; n < N; ++n) {
        if constexpr (kReads && Delta) L::store(reading.sum + first + n * L::width, sum[n]);
        if constexpr (kReads || kGives) L::store(reading.out + first + n * L::width, out[n]);
    }
}

/// The rows of a matrix, one after another.
class MatrixRows {
  public:
    explicit MatrixRows(const StateArgs& args) : piece_(args.pieces), row_bytes_(int64_t(args.row_floats) * 4) { begin_piece(); }

    float* next() {
        if (at_ == end_) ++piece_, begin_piece();
        uint8_t* const row = at_;
        at_ += row_bytes_;
        return reinterpret_cast<float*>(row);
    }

  private:
    void begin_piece() {
        at_ = const_cast<uint8_t*>(piece_->first);
        end_ = at_ + piece_->bytes;
    }

    const Stretch* piece_;
    uint8_t *at_, *end_;
    int64_t row_bytes_;
};

constexpr int kPassRows = 8;  // 4 KB of 128 floats: they stay in the cache while strips of columns read them

template <class L, DType D, bool Delta, Pass P>
[[gnu::noinline]] void pass(const StateArgs& args, const Taking& taking, const Reading& reading, Beside<L>& beside) {
    const int dim = args.key.dim, value16 = round_up16(args.value.dim);
    constexpr int kMost = Delta && L::width == 8 ? 4 : 8;  // sums fit the registers
    MatrixRows matrix(args);
    for (int begin = 0; begin < dim; begin += kPassRows) {
        const int end = begin + kPassRows < dim ? begin + kPassRows : dim;
        float* rows[kPassRows];
        for (int i = begin; i < end; ++i) rows[i - begin] = matrix.next();
        int first = 0;
        const auto go_on = [&]<int N>() {
            for (; first + N * L::width <= value16; first += N * L::width)
                pass_columns<L, D, Delta, P, N>(rows, begin, end, first, taking, reading);
        };
        go_on.template operator()<kMost>();
        if constexpr (kMost > 4) go_on.template operator()<4>();
        go_on.template operator()<2>();
        go_on.template operator()<1>();
        beside.go_on();
    }
}

/// Floats of a single row.
struct LoneRoom {
    float *a, *k, *q, *earlier_a, *taken, *sum, *out;

    LoneRoom(float* room, int key16, int value16)
        : a(room), k(a + key16), q(k + key16), earlier_a(q + key16), taken(earlier_a + key16), sum(taken + value16),
          out(sum + value16) {}
};

template <class L>
void keep_pending(const StateArgs& args, const float* key, const float* taken) {
    if (args.coming_key)
        for (int i = 0; i < round_up16(args.key.dim); i += L::width) L::store(args.coming_key + i, L::load(key + i));
    if (args.coming_taken)
        for (int i = 0; i < round_up16(args.value.dim); i += L::width) L::store(args.coming_taken + i, L::load(taken + i));
}

template <class L, DType D>
void take_delta(const StateArgs& args, const Taking& earlier, const LoneRoom& room, float rate, Beside<L>& beside) {
    const float *const q = args.shared, *const k = q + round_up16(args.key.dim);
    const int key16 = round_up16(args.key.dim), value16 = round_up16(args.value.dim);
    for (int i = 0; i < key16; i += L::width) {
        L::store(room.k + i, L::mul(L::load(room.a + i), L::load(k + i)));
        L::store(room.q + i, L::mul(L::load(room.a + i), L::load(q + i)));
    }
    for (int i = 0; i < value16; i += L::width) L::store(room.sum + i, L::set1(0.0f)), L::store(room.out + i, L::set1(0.0f));
    const Reading reading{room.k, room.q, nullptr, nullptr, room.sum, room.out};
    earlier.t ? pass<L, D, true, Pass::takes_reads>(args, earlier, reading, beside)
              : pass<L, D, true, Pass::reads>(args, earlier, reading, beside);
    const typename L::vec shared = L::set1(dot<L>(q, k, key16));
    for (int i = 0; i < value16; i += L::width) {
        const typename L::vec t = L::mul(L::sub(L::load(args.values + i), L::load(room.sum + i)), L::set1(rate));
        L::store(room.taken + i, t);
        L::store(room.out + i, L::fma(shared, t, L::load(room.out + i)));
    }
    if (!args.coming_taken) pass<L, D, true, Pass::takes>(args, {k, room.a, room.taken}, reading, beside);
}

template <class L, DType D>
void take_scan(const StateArgs& args, const Taking& earlier, const LoneRoom& room, float rate, Beside<L>& beside) {
    const float *const q = args.shared, *const k = q + round_up16(args.key.dim);
    for (int i = 0; i < round_up16(args.value.dim); i += L::width) {
        L::store(room.taken + i, L::mul(L::load(args.values + i), L::set1(rate)));
        L::store(room.out + i, L::set1(0.0f));
    }
    const Reading reading{k, q, room.a, room.taken, nullptr, room.out};
    if (!args.coming_taken) return pass<L, D, false, Pass::takes_gives>(args, {k, room.a, room.taken}, reading, beside);
    earlier.t ? pass<L, D, false, Pass::takes_reads>(args, earlier, reading, beside)
              : pass<L, D, false, Pass::reads>(args, earlier, reading, beside);
}

/// `delta` and `scan`: the single row that arrives. Before it come the rows that the matrix lacks: none, one that is
/// applied here too, or several that were applied before.
template <class L>
void advance_lone(const StateArgs& args) {
    const int dim = args.key.dim, key16 = round_up16(dim), value16 = round_up16(args.value.dim);
    Making<L>(&args).finish();
    if (args.position == 0 && (args.num_earlier == 0 || args.earlier_taken)) {
        MatrixRows matrix(args);
        for (int i = 0; i < dim; ++i) clear_row<L>(args, matrix.next());
    }
    const LoneRoom room(args.scratch, key16, value16);
    const uint8_t* const numbers = row_of(args, args.num_earlier);
    read_decays<L>(args, numbers, key16, room.a);
    if (args.earlier_taken) read_decays<L>(args, row_of(args, args.num_earlier - 1), key16, room.earlier_a);
    const Taking earlier{args.earlier_key, room.earlier_a, args.earlier_taken};
    const float rate = number_at(numbers + args.first_rate);
    const bool two_passes = args.recurrence == rworker::Recurrence::delta && !args.coming_taken;
    Beside<L> beside(args, (dim + kPassRows - 1) / kPassRows * (two_passes ? 2 : 1));
    with_dtype(args.state_dtype, [&]<DType D>() {
        args.recurrence == rworker::Recurrence::delta ? take_delta<L, D>(args, earlier, room, rate, beside)
                                                      : take_scan<L, D>(args, earlier, room, rate, beside);
    });
    beside.finish();
    keep_pending<L>(args, args.shared + key16, room.taken);
    add_skip<L>(args, value16, args.values, room.out);
    write_outputs<L>(args, args.num_earlier, room.out);
}

}  // namespace
