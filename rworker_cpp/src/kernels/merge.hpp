// Merges the partial results of a sequence's splits, always in the same tree.
//
// The tree is that of a binary counter over absolute split numbers: two nodes that are the halves of an aligned power
// of two of splits are merged into one. The nodes that remain at the end are merged from left to right. So a range of
// 2^k splits that begins at a multiple of 2^k is one node, and parts of a sequence that were merged elsewhere give the
// same bits.
#pragma once

#include "kernels/math.hpp"
#include "kernels/rows.hpp"

namespace {

using rworker::CombineArgs;
using rworker::MergeArgs;

/// The partial result of one row in memory; see partial_floats.
template <class Float>
struct Partial {
    Float *max, *sum, *output;

    explicit Partial(Float* data) : max(data), sum(data + 1), output(data + rworker::kPartialHead) {}

    /// The partial result whose output is `output`.
    static Partial of_output(Float* output) { return Partial(output - rworker::kPartialHead); }
};

/// Merges a part into (max, sum, output) of one row. An empty part (sum 0) changes no bit, and the first part that is
/// not empty is copied as it is; NaN is not empty.
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
    const float keep = exp_of_nonpositive<L>(max - new_max), weight = exp_of_nonpositive<L>(part_max - new_max);
    max = new_max;
    sum = sum * keep + *part.sum * weight;
    for (int d = 0; d < n; d += L::width) {
        const auto kept = L::mul(L::load(output + d), L::set1(keep));
        L::store(output + d, L::fma(L::load(part.output + d), L::set1(weight), kept));
    }
}

/// output <- folded / sum. A sink is a score without a value: it only increases the sum.
template <class L>
inline void finish(float max, float sum, const float* sink, const float* folded, float* output, int n) {
    float keep = 1.0f;
    if (sink) {
        const float new_max = max > *sink ? max : *sink;
        keep = exp_of_nonpositive<L>(max - new_max);
        sum = sum * keep + exp_of_nonpositive<L>(*sink - new_max);
    }
    const auto factor = L::set1(keep / sum);
    for (int d = 0; d < n; d += L::width) L::store(output + d, L::mul(L::load(folded + d), factor));
}

/// The nodes until now, widest first. Those of splits before the first one are empty (`at` is null).
template <class L>
struct Tree {
    struct Node {
        int64_t width;  // in splits
        float* at;
    };
    Node nodes[64];  // widths are different powers of two, except the last two while they are merged
    int count = 0;
    const int padded_dim;

    Tree(int64_t first_split, int n) : padded_dim(n) {
        for (int64_t left = first_split; left > 0; left -= nodes[count++].width)
            nodes[count] = {int64_t(1) << (63 - __builtin_clzll(uint64_t(left))), nullptr};
    }

    /// Adds the next `width` splits, which begin at a multiple of it.
    void push(int64_t width, float* partial) {
        nodes[count++] = {width, partial};
        for (; count > 1 && nodes[count - 2].width == nodes[count - 1].width; --count) {
            nodes[count - 2].at = joined(nodes[count - 2].at, nodes[count - 1].at);
            nodes[count - 2].width *= 2;
        }
    }

    /// Returns all nodes merged into one; null where all are empty.
    float* root() const {
        float* all = nullptr;
        for (int i = 0; i < count; ++i) all = joined(all, nodes[i].at);
        return all;
    }

    float* joined(float* lower, float* upper) const {
        if (!lower || !upper) return lower ? lower : upper;
        const Partial<float> into(lower);
        fold<L>(*into.max, *into.sum, into.output, Partial<const float>(upper), padded_dim);
        return lower;
    }
};

/// Writes a node in the form that is sent: numbers without padding.
inline void write_node(const float* partial, int value_dim, float* node) {
    node[0] = -kInfinity;
    node[1] = 0.0f;
    if (!partial) {
        for (int d = 0; d < value_dim; ++d) node[2 + d] = 0.0f;
        return;
    }
    const Partial<const float> from(partial);
    node[0] = *from.max;
    node[1] = *from.sum;
    __builtin_memcpy(node + 2, from.output, size_t(value_dim) * sizeof(float));
}

inline void read_node(const float* node, int value_dim, float* partial) {
    const Partial<float> into(partial);
    *into.max = node[0];
    *into.sum = node[1];
    __builtin_memcpy(into.output, node + 2, size_t(value_dim) * sizeof(float));
    for (int d = value_dim; d < round_up16(value_dim); ++d) into.output[d] = 0.0f;
}

/// Writes a row of the model's dtype from the merged result of all splits.
template <class L>
inline void write_row(const float* folded, const float* sink, DType dtype, int value_dim, float* scratch, void* out) {
    const Partial<const float> all(folded);
    finish<L>(*all.max, *all.sum, sink, all.output, scratch, round_up16(value_dim));
    narrow_row<L>(dtype, scratch, value_dim, out);
}

template <class L>
void merge(const MergeArgs& args) {
    const int padded_dim = round_up16(args.value_dim);
    for (int64_t token = 0; token < args.num_tokens; ++token)
        for (int head = 0; head < args.group; ++head) {
            float* part = args.partials + token * args.num_splits * args.partial_stride +
                          head * rworker::partial_floats(args.value_dim);
            Tree<L> tree(args.first_split, padded_dim);
            for (int64_t i = 0; i < args.num_splits; ++i, part += args.partial_stride) tree.push(1, part);
            if (args.nodes) {
                float* const node = args.nodes + token * tree.count * args.node_stride +
                                    head * rworker::node_floats(args.value_dim);
                for (int i = 0; i < tree.count; ++i)
                    write_node(tree.nodes[i].at, args.value_dim, node + i * args.node_stride);
                continue;
            }
            const int64_t out = token * args.token_stride + head * args.value_dim;
            write_row<L>(tree.root(), args.sinks ? args.sinks + head : nullptr, args.dtype, args.value_dim,
                         args.scratch, const_cast<void*>(element(args.dtype, args.out, out)));
        }
}

template <class L>
void combine(const CombineArgs& args) {
    const int64_t node_floats = rworker::node_floats(args.value_dim);
    const int64_t slot_floats = rworker::partial_floats(args.value_dim);
    for (int64_t row = 0; row < args.num_rows; ++row)
        for (int head = 0; head < args.num_heads; ++head) {
            Tree<L> tree(args.parts[0].start, round_up16(args.value_dim));
            float* slot = args.scratch;
            for (int64_t i = 0; i < args.num_parts; ++i, slot += slot_floats) {
                const rworker::RangePart& part = args.parts[i];
                read_node(part.data + row * part.row_stride + head * node_floats, args.value_dim, slot);
                tree.push(part.width, slot);
            }
            const int64_t out = (row * args.num_heads + head) * args.value_dim;
            write_row<L>(tree.root(), args.sinks ? args.sinks + head : nullptr, args.dtype, args.value_dim, slot,
                         const_cast<void*>(element(args.dtype, args.out, out)));
        }
}

}  // namespace
