// Folding the partial results of a sequence's splits, always in their order.
#pragma once

#include "kernels/math.hpp"
#include "kernels/rows.hpp"

namespace {

using rworker::MergeArgs;

/// The partial result of one row in memory; see partial_floats.
template <class Float>
struct Partial {
    Float *max, *sum, *output;

    explicit Partial(Float* data) : max(data), sum(data + 1), output(data + rworker::kPartialHead) {}

    /// The one that `output` is the output of.
    static Partial of_output(Float* output) { return Partial(output - rworker::kPartialHead); }
};

/// (max, sum, output) of one row <- itself + a part. An empty part (sum 0) leaves every bit as it was, and the first
/// that is not empty is taken as it is; a NaN is not empty.
template <class L>
inline void fold(float& max, float& sum, float* output, Partial<const float> part, int n) {
    const float part_max = *part.max;
    if (part_max == -kInfinity && *part.sum == 0.0f) return;
    if (max == -kInfinity && sum == 0.0f) {
        max = part_max, sum = *part.sum;
        __builtin_memcpy(output, part.output, size_t(n) * sizeof(float));
        return;
    }
    const float new_max = max > part_max ? max : part_max;
    const float keep = exp_nonpositive_one<L>(max - new_max), weight = exp_nonpositive_one<L>(part_max - new_max);
    max = new_max;
    sum = sum * keep + *part.sum * weight;
    for (int d = 0; d < n; d += L::width) {
        const auto kept = L::mul(L::load(output + d), L::set1(keep));
        L::store(output + d, L::fma(L::load(part.output + d), L::set1(weight), kept));
    }
}

/// output <- folded / sum. A sink is a score without a value: it only takes its share of the sum.
template <class L>
inline void finish(float max, float sum, const float* sink, const float* folded, float* output, int n) {
    float keep = 1.0f;
    if (sink) {
        const float new_max = max > *sink ? max : *sink;
        keep = exp_nonpositive_one<L>(max - new_max);
        sum = sum * keep + exp_nonpositive_one<L>(*sink - new_max);
    }
    const auto factor = L::set1(keep / sum);
    for (int d = 0; d < n; d += L::width) L::store(output + d, L::mul(L::load(folded + d), factor));
}

template <class L>
void merge(const MergeArgs& args) {
    const int padded_dim = round_up16(args.value_dim);
    for (int64_t token = 0; token < args.num_tokens; ++token)
        for (int head = 0; head < args.group; ++head) {
            const float* part = args.partials + token * args.num_partials * args.partial_stride +
                                head * rworker::partial_floats(args.value_dim);
            const float* const sink = args.sinks ? args.sinks + head : nullptr;
            if (args.num_partials == 1) {
                const Partial only(part);
                finish<L>(*only.max, *only.sum, sink, only.output, args.scratch, padded_dim);
            } else {
                float max = -kInfinity, sum = 0.0f;
                for (int64_t i = 0; i < args.num_partials; ++i, part += args.partial_stride)
                    fold<L>(max, sum, args.scratch, Partial(part), padded_dim);
                finish<L>(max, sum, sink, args.scratch, args.scratch, padded_dim);
            }
            const int64_t out = token * args.token_stride + head * args.value_dim;
            narrow_row<L>(args.dtype, args.scratch, args.value_dim,
                          const_cast<void*>(element(args.dtype, args.out, out)));
        }
}

}  // namespace
