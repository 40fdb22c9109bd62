// Attention over codes with queries and weights as bytes where these are exact enough, else with more bits. Each row
// decides for itself, so its bits do not depend on other rows. The including file defines exp2_nonpositive for its
// vectors.
#pragma once

#include "kernels/attend.hpp"
#include "kernels/bytes.hpp"

namespace {

/// Up to kBlockRows query rows over all chunks of the split; rows with more bits come last. `L` multiplies bytes.
/// L::Wide multiplies the factors that factors.hpp makes of queries and weights; its quantize_query<L, D> is
/// quantize_query_bytes.
template <class L, DType D>
struct ByteBlock : RowBlock<L, D> {
    using Block = RowBlock<L, D>;
    /// kSoftmaxDims: dims whose products take as long as a row's softmax and the rounding of its weights. kManyRows:
    /// from this many rows on arithmetic limits the speed, so prefetching costs more than it saves.
    static constexpr int kSoftmaxDims = 64, kManyRows = 7;
    using Wide = typename L::Wide;
    using Block::args, Block::begin, Block::chunk_size, Block::end, Block::outputs, Block::padded_dim, Block::queries,
        Block::query_stride, Block::rows, Block::scores, Block::sums;
    int narrow = 0;
    alignas(64) float factors[kBlockRows] = {};  // of scores; afterwards the scores are exponents of 2
    alignas(64) uint32_t packed[kBlockRows * packed_words<D>(rworker::kMaxQuantizedHeadDim)];

    using Block::Block;

    void run() {
        Block::prepare();
        for (int r = 0; r < rows; ++r)
            if (is_narrow(queries + r * query_stride, query_stride) != 0.0f) swap_rows(narrow++, r);
        for (int r = 0; r < rows; ++r) factors[r] = kLog2E * (r < narrow ? scale_of(r) : 1.0f);
        for_row_groups<L, D>(narrow, [&]<int R>(int r) {
            pack_queries<D, R>(queries + r * query_stride, query_stride, packed_rows(r));
        });
        for (int64_t chunk = begin / chunk_size * chunk_size; chunk < end; chunk += chunk_size)
            attend_chunk(chunk, clip(begin, end, chunk, chunk_size));
        for (int r = 0; r < rows; ++r) {
            const auto partial = Partial<float>::of_output(outputs[r]);
            *partial.max = sums.max[r] * kLn2, *partial.sum = sums.sum[r];
            if constexpr (is_rotated(D)) rotate(outputs[r], args.value_dim);
        }
    }

    float scale_of(int row) const { return queries[row * query_stride + query_stride / 2]; }

    uint32_t* packed_rows(int row) { return packed + row * packed_words<D>(query_stride); }

    void swap_rows(int a, int b) {
        if (a == b) return;
        for (int i = 0; i < query_stride; ++i) swap(queries[a * query_stride + i], queries[b * query_stride + i]);
        swap(this->begins[a], this->begins[b]), swap(this->ends[a], this->ends[b]);
        swap(outputs[a], outputs[b]);
    }

    template <class T>
    static void swap(T& a, T& b) {
        const T kept = a;
        a = b, b = kept;
    }

    void attend_chunk(int64_t chunk, Range seen) {
        Tile tiles[Block::chunk_tiles];
        this->find_tiles(chunk, seen, tiles);
        const Coming coming = this->coming_after(chunk);
        Ahead ahead(coming, row_groups<L, D>(narrow) + row_groups<Wide, D>(rows - narrow), rows,
                    rows < kManyRows ? kSoftmaxDims : 0, args.key_dim + args.value_dim);
        touch(coming);
        for_row_groups<L, D>(narrow, [&]<int R>(int r) {
            score_byte_rows<L, D, R>(tiles, seen, ahead, packed_rows(r), this->key_lines, scores + r * chunk_size);
        });
        for_wide_groups([&]<int R>(int r) {
            score_rows<Wide, D, R>(tiles, seen, ahead, queries + r * query_stride, query_stride, this->key_lines,
                                   args.scale, scores + r * chunk_size);
        });
        with_constant_range<chunk_size>(whole_tiles(seen), [&](Range range) { weigh_scores(chunk, range, ahead); });
        for_row_groups<L, D>(narrow, [&]<int R>(int r) {
            add_byte_value_rows<L, D, R>(tiles, seen, ahead, scores + r * chunk_size, sums.keep + r, outputs + r,
                                         padded_dim);
        });
        for_wide_groups([&]<int R>(int r) {
            add_value_rows<Wide, D, R>(tiles, seen, ahead, scores + r * chunk_size, sums.keep + r, outputs + r,
                                       padded_dim);
        });
    }

    /// A prefetch waits until the address of its page is known; so parallel pages are touched at once.
    static void touch(const Coming& coming) {
        for (int i = 0; i < coming.num_tiles; ++i) {
            __builtin_prefetch(coming.keys[i], 0, 2);
            __builtin_prefetch(coming.values[i], 0, 2);
        }
    }

    /// Like RowBlock's soften, in powers of two.
    [[gnu::always_inline]] void weigh_scores(int64_t chunk, Range worked_on, Ahead& ahead) {
        if (args.soft_cap != 0.0f) cap_rows(worked_on);
        for (int r = 0; r < rows; ++r)
            sums.find_top(r, scores + r * chunk_size, worked_on, clip(this->begins[r], this->ends[r], chunk, chunk_size));
        for (int r = 0; r < rows; r += L::width) {
            const auto old = L::load(sums.max + r);
            const auto largest = L::max(old, L::mul(L::load(sums.top + r), L::load(factors + r)));
            const auto from = L::if_less(largest, L::set1(-__FLT_MAX__), L::set1(0.0f), largest);
            L::store(sums.max + r, largest), L::store(sums.base + r, from);
            L::store(sums.keep + r, exp2_nonpositive(L::sub(old, from)));
        }
        for (int r = 0; r < rows; ++r) {
            ahead.ask_for_row();
            float* const row_scores = scores + r * chunk_size;
            const auto factor = L::set1(factors[r]), base = L::set1(-sums.base[r]);
            auto total = L::set1(0.0f);
            RWORKER_UNROLL
            for (int t = worked_on.begin; t < worked_on.end; t += L::width) {
                const auto weight = exp2_nonpositive(L::fma(L::load(row_scores + t), factor, base));
                L::store(row_scores + t, weight);
                total = L::add(total, weight);
            }
            sums.added[r] = L::reduce_add(total);
        }
        sums.renew_sums(rows);
    }

    [[gnu::noinline]] void cap_rows(Range worked_on) {
        for (int r = 0; r < rows; ++r) {
            float* const row_scores = scores + r * chunk_size;
            if (r < narrow)
                for (int t = worked_on.begin; t < worked_on.end; t += L::width)
                    L::store(row_scores + t, L::mul(L::load(row_scores + t), L::set1(scale_of(r))));
            cap_scores<L>(row_scores, worked_on, args.soft_cap);
            factors[r] = kLog2E;
        }
    }

    template <class F>
    void for_wide_groups(F f) const {
        for_row_groups<Wide, D>(rows - narrow, [&]<int R>(int r) { f.template operator()<R>(narrow + r); });
    }
};

/// For layers without ALiBi: with it, rows would have to stay in order.
template <class L, DType D>
void attend_bytes(const AttendArgs& args) {
    uint8_t* const open_keys = args.end % kTileTokens != 0 ? turn_open_keys<L, D>(args) : nullptr;
    const int64_t rows = args.num_tokens * args.group;
    for (int64_t row = 0; row < rows; row += kBlockRows) ByteBlock<L, D>(args, open_keys, row, rows - row).run();
}

}  // namespace
