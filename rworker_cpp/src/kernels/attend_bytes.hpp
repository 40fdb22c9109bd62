// Attention over int8 codes with queries and weights of bytes where these are exact enough, of 16 bits where not. A row
// tells it by itself, so its bits depend on no neighbour.
#pragma once

#include "kernels/attend.hpp"
#include "kernels/bytes.hpp"

namespace {

/// Up to kBlockRows query rows over all chunks of the split, those of 16 bits last. `L` multiplies bytes, L::Wide 16
/// bits; quantize_query<L> is quantize_query_bytes.
template <class L>
struct ByteBlock : RowBlock<L, DType::int8> {
    using Block = RowBlock<L, DType::int8>;
    using Wide = typename L::Wide;
    using Block::args, Block::begin, Block::end, Block::outputs, Block::padded_dim, Block::queries,
        Block::query_stride, Block::rows, Block::scores, Block::sums;
    int narrow = 0;

    using Block::Block;

    void run() {
        Block::prepare();
        for (int r = 0; r < rows; ++r)
            if (is_narrow(queries + r * query_stride, query_stride) != 0.0f) swap_rows(narrow++, r);
        for (int64_t chunk = begin / kChunkTokens * kChunkTokens; chunk < end; chunk += kChunkTokens)
            attend_chunk(chunk, clip(begin, end, chunk));
        for (int r = 0; r < rows; ++r) {
            const auto partial = Partial<float>::of_output(outputs[r]);
            *partial.max = sums.max[r], *partial.sum = sums.sum[r];
        }
    }

    void swap_rows(int a, int b) {
        if (a == b) return;
        for (int i = 0; i < query_stride; ++i) swap(queries[a * query_stride + i], queries[b * query_stride + i]);
        swap(this->ends[a], this->ends[b]);
        swap(outputs[a], outputs[b]);
    }

    template <class T>
    static void swap(T& a, T& b) {
        const T kept = a;
        a = b, b = kept;
    }

    void attend_chunk(int64_t chunk, Range seen) {
        Tile tiles[kChunkTiles];
        this->find_tiles(chunk, seen, tiles);
        const Coming coming = this->coming_after(chunk);
        Ahead ahead(coming, row_groups<L, DType::int8>(narrow) + row_groups<Wide, DType::int8>(rows - narrow));
        for_row_groups<L, DType::int8>(narrow, [&]<int R>(int r) {
            score_byte_rows<L, R>(tiles, seen, ahead, queries + r * query_stride, query_stride, this->key_lines,
                                  scores + r * kChunkTokens);
        });
        for_wide_groups([&]<int R>(int r) {
            score_rows<Wide, DType::int8, R>(tiles, seen, ahead, queries + r * query_stride, query_stride,
                                             this->key_lines, args.scale, scores + r * kChunkTokens);
        });
        with_constant_range(whole_tiles(seen), [&](Range range) { this->soften(chunk, range); });
        for_row_groups<L, DType::int8>(narrow, [&]<int R>(int r) {
            add_byte_value_rows<L, R>(tiles, seen, ahead, scores + r * kChunkTokens, sums.keep + r, outputs + r,
                                      padded_dim);
        });
        for_wide_groups([&]<int R>(int r) {
            add_value_rows<Wide, DType::int8, R>(tiles, seen, ahead, scores + r * kChunkTokens, sums.keep + r,
                                                 outputs + r, padded_dim);
        });
    }

    template <class F>
    void for_wide_groups(F f) const {
        for_row_groups<Wide, DType::int8>(rows - narrow, [&]<int R>(int r) { f.template operator()<R>(narrow + r); });
    }
};

/// For layers without ALiBi, whose rows would have to stay in their places.
template <class L>
void attend_bytes(const AttendArgs& args) {
    uint8_t* const open_keys = args.end % kTileTokens != 0 ? turn_open_keys<L, DType::int8>(args) : nullptr;
    const int64_t rows = args.num_tokens * args.group;
    for (int64_t row = 0; row < rows; row += kBlockRows) ByteBlock<L>(args, open_keys, row, rows - row).run();
}

}  // namespace
