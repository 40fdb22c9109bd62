// One layer of one mini-batch as a job for the pool.
#pragma once

#include "rworker/layer_job.hpp"
#include "rworker/picks.hpp"
#include "rworker/step_plan.hpp"
#include "rworker/worker.hpp"

namespace rworker {

/// Each piece of work stores the new tokens of its split, then computes attention of its rows over the split. So no
/// piece waits for another, except for a piece that only stores. Meanwhile the processor already loads the first data
/// of the next piece.
class AttentionJob final : public LayerJob {
  public:
    explicit AttentionJob(Worker& worker) : worker_(worker) {}

    void prepare(const WorkList& list, std::int64_t layer, const Payload& payload);
    /// The index layer whose picks of this step are known; -1: none.
    std::int64_t picked_by() const { return picks_.layer(); }
    void forget_picks() { picks_.forget(); }
    /// Sets how many of the last index layer's picks lie in each range: counts [row and node][head]. It uses
    /// the counts of each row's first node. Throws Error for impossible counts.
    void share(std::span<const std::int32_t> counts);
    /// True where these counts are known.
    bool is_shared() const { return is_shared_; }
    void run(std::int64_t item, std::int64_t next_item, int thread) noexcept override;
    void leave() noexcept override;

  private:
    /// A unit of work in one KV head, or nothing.
    struct Piece {
        const WorkUnit* unit;
        std::int64_t head;
    };

    void append(const Piece& piece) const;
    void append(const PlannedSpan& span, std::int64_t head, std::int64_t begin, std::int64_t end) const;
    void store_all() const;
    void pick(const PlannedSpan& span, const float* scores, std::int64_t stride) const;
    std::int64_t end_of(const Piece& piece) const;
    PickedTokens picked_tokens(const Piece& piece) const;
    void attend_picked(const Piece& piece, const Piece& next, int thread) const;
    HeadView picked_view(const Piece& piece, const HeadView& view, int thread, bool next = false) const;
    void attend(const Piece& piece, const NextTokens* next, int thread) const;
    HeadView view_to_attend(const Piece& piece, int thread) const;
    void finish(const Piece& piece, float* partials, std::int64_t stride, int thread) const;
    void count_off(const WorkUnit& unit, std::int64_t head, int thread) const;
    void merge(const PlannedSpan& span, std::int64_t head, float* partials, std::int64_t stride, int thread) const;
    NextTokens tokens_of(const Piece& piece) const;
    void prefetch_append(const Piece& piece) const;

    Worker& worker_;
    const WorkList* list_ = nullptr;
    const LayerSpec* spec_ = nullptr;
    Payload payload_{};
    mutable Picks picks_;  // the thread that finished a query's scores writes its picks
    bool is_shared_ = false;
};

}  // namespace rworker
