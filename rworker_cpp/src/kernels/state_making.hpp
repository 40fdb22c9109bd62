// The inputs of one token of a head, over any Lanes. They are made one vector at a time, so that it can be done while
// memory is read.
#pragma once

#include "kernels/state_inputs.hpp"

namespace {

/// Makes the inputs of a single row, vector by vector: the convolution's results of value, query and key.
template <class L>
class Making {
  public:
    /// `args`: null where there is nothing to make.
    explicit Making(const StateArgs* args) : args_(args) {
        if (!args || args->made) return;
        num_parts_ = args->shares ? 1 : 3;
        begin_part();
    }

    int vectors_left() const {
        if (part_ == num_parts_) return 0;
        const int keys = args_->shares ? 0 : (args_->query.dim + args_->key.dim) / L::width + 2;
        return args_->value.dim / L::width + 1 + keys;
    }

    [[gnu::noinline]] void make(int count) {
        for (; count > 0 && part_ < num_parts_; --count) {
            make_vector();
            if (at_ >= channels_->dim) end_part();
        }
    }

    void finish() { make(1 << 30); }

  private:
    void begin_part() {
        const StateArgs& args = *args_;
        channels_ = part_ == 0 ? &args.value : part_ == 1 ? &args.query : &args.key;
        out_ = part_ == 0 ? args.values : args.shared + (part_ - 1) * round_up16(args.key.dim);
        at_ = 0;
        first_raw_ = args.taps - 1 - int(args.num_earlier);
        for (int tap = first_raw_ > 0 ? first_raw_ : 0; tap < args.taps; ++tap)
            sources_[tap] = element(args.dtype, row_of(args, tap - first_raw_), channels_->first_channel);
        begin_window_row();
    }

    /// Begins a row of the window; a tap may have several rows. Tokens before the first one are zeros.
    void begin_window_row() {
        const StateArgs& args = *args_;
        const int rows_of = (channels_->dim + args.row_floats - 1) / args.row_floats;
        for (int tap = 0; tap < first_raw_; ++tap) {
            const int64_t token = args.position - first_raw_ + tap;
            const int64_t row = token % (args.taps - 1) * rows_of + at_ / args.row_floats;
            sources_[tap] = token < 0 ? nullptr : channels_->window[row] - at_;
        }
    }

    void end_part() {
        const StateArgs& args = *args_;
        const int dim16 = round_up16(channels_->dim);
        for (int i = channels_->dim; i < dim16; ++i) out_[i] = 0.0f;
        if (part_ > 0) scale_row<L>(part_ == 1 ? args.scale : 1.0f, args.norm, out_, dim16);
        if (++part_ < num_parts_) begin_part();
    }

    typename L::vec float_input(int tap) const { return L::load(static_cast<const float*>(sources_[tap]) + at_); }

    typename L::vec input(int tap) const {
        const void* source = sources_[tap];
        if (!source) return L::set1(0.0f);
        if (tap < first_raw_) return float_input(tap);
        alignas(64) float last[L::width] = {};
        const int left = channels_->dim - at_;
        int64_t first = at_;
        if (left < L::width) {
            copy_elements(args_->dtype, element(args_->dtype, source, at_), last, left);
            source = last, first = 0;
        }
        typename L::vec x;
        with_dtype(args_->dtype, [&]<DType D>() { x = widen<L, D>(source, first); });
        return x;
    }

    bool has_plain_floats() const {
        const StateArgs& args = *args_;
        return args.taps == 4 && args.dtype == DType::float32 && channels_->dim - at_ >= L::width &&
               args.position + args.num_earlier >= 3;
    }

    void make_vector() {
        const StateArgs& args = *args_;
        const int64_t channel = channels_->first_channel + at_;
        const float* const filters = args.filters + channel;
        typename L::vec sum = L::load(args.bias + channel);
        if (has_plain_floats()) {
            RWORKER_UNROLL
            for (int tap = 0; tap < 4; ++tap)
                sum = L::fma(L::load(filters + tap * args.channels), float_input(tap), sum);
        } else {
            for (int tap = 0; tap < args.taps; ++tap) sum = L::fma(L::load(filters + tap * args.channels), input(tap), sum);
        }
        L::store(out_ + at_, args.silu ? silu<L>(sum) : sum);
        at_ += L::width;
        if (at_ % args.row_floats == 0 && at_ < channels_->dim) begin_window_row();
    }

    const StateArgs* args_;
    const StateChannels* channels_ = nullptr;
    float* out_ = nullptr;
    int part_ = 0, num_parts_ = 0, at_ = 0, first_raw_ = 0;
    const void* sources_[16];  // of each tap: rows of windows; from first_raw_ on, rows in the payload's dtype
};

}  // namespace
