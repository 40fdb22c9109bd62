// The part of an attention job for layers whose queries see only picked tokens, and for the index layers that pick.
#include <algorithm>
#include <cstring>

#include "rworker/attention_job.hpp"

namespace rworker {

/// A query may pick any row of the step, so all rows are stored first.
void AttentionJob::store_all() const {
    for (const PlannedSpan& span : list_->stores)
        for (std::int64_t head = 0; head < spec_->num_kv_heads; ++head) append(span, head, span.context_len, span.end);
}

void AttentionJob::attend_picked(const Piece& piece, const Piece& next, int thread) const {
    if (!next.unit || spec_->keeps_rows()) return attend(piece, nullptr, thread);
    NextTokens tokens = tokens_of(next);
    if (tokens.end <= tokens.begin) return attend(piece, nullptr, thread);
    tokens.view = picked_view(next, tokens.view, thread, true);
    attend(piece, &tokens, thread);
}

/// Picks for an index layer's queries once all their scores are computed. Its only output are the ranks of ranges.
void AttentionJob::pick(const PlannedSpan& span, const float* scores, std::int64_t stride) const {
    const std::int64_t node_ranks = picks_.heads() * spec_->index()->picks, row_ranks = span.num_nodes * node_ranks;
    for (std::int64_t i = 0; i < span.num_rows; ++i) {
        const std::int64_t query = span.first_row + i, position = span.context_len + i;
        const float* const own = scores + i * span.num_splits * stride;
        if (span.num_nodes == 0) {
            picks_.pick(query, position, own, stride);
            continue;
        }
        auto* const ranks =
            reinterpret_cast<std::uint32_t*>(payload_.partials) + span.first_out_row * node_ranks + i * row_ranks;
        std::fill_n(ranks, row_ranks, 0);
        picks_.rank(query, position, span.end, own, stride, ranks);
    }
    if (span.num_nodes > 0) return;
    const std::int64_t row_bytes = spec_->num_heads * spec_->value_dim * item_bytes(worker_.model_dtype_);
    std::memset(static_cast<std::uint8_t*>(payload_.out) + span.first_out_row * row_bytes, 0, span.num_rows * row_bytes);
}

void AttentionJob::share(std::span<const std::int32_t> counts) {
    require(!is_shared_, "share: it was told before what the ranges' rows pick");
    for (const bool check : {true, false})
        for (const PlannedSpan& span : list_->spans)
            for (std::int64_t i = 0; i < (span.num_nodes > 0 ? span.num_rows : 0); ++i) {
                const std::int32_t* const own =
                    counts.data() + (span.first_out_row + i * span.num_nodes) * picks_.heads();
                if (!check)
                    picks_.share(span.first_row + i, own);
                else
                    require(picks_.fits(span.first_row + i, own), "share: a row picks 0 to as many as it has ranked");
            }
    is_shared_ = true;
}

/// What the last row of a piece's span sees, and all that the span reads; of picked tokens, those in this range.
PickedTokens AttentionJob::picked_tokens(const Piece& piece) const {
    const PlannedSpan& span = list_->spans[piece.unit->span];
    if (spec_->picked_by < 0 || span.num_nodes == 0) return {span.context_len + span.num_rows, span.end};
    return picks_.shared(span.first_row, picks_.heads() > 1 ? piece.head : 0);
}

/// The cache as the queries of a piece see it: the picked part of `view`.
HeadView AttentionJob::picked_view(const Piece& piece, const HeadView& view, int thread, bool next) const {
    const PlannedSpan& query = list_->spans[piece.unit->span];
    const Index& index = *worker_.cache_.layers()[spec_->picked_by].index();
    const std::int64_t begin = piece.unit->split * kSplitTokens, end = end_of(piece);
    PickedRows& rows = worker_.picked_rows_[thread];
    const std::int32_t* const picks = picks_.of(query.first_row, index.block > 0 ? piece.head : 0);
    if (index.block == 0) return rows.gather(view, *spec_, worker_.cache_.dtype(), picks, begin, end);
    return rows.table(view, index.block, worker_.cache_.block_size(), picks, begin, end, next);
}

}  // namespace rworker
