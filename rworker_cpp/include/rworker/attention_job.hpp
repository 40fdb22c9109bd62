// One layer of one mini-batch as a job for the pool.
#pragma once

#include "rworker/step_plan.hpp"
#include "rworker/thread_pool.hpp"
#include "rworker/worker.hpp"

namespace rworker {

/// Items are (unit, KV head), heads fastest: they lie side by side in a block. Each stores the new tokens that fall
/// into its split, then attends its rows to the split; so no item waits for another.
class AttentionJob final : public Job {
  public:
    explicit AttentionJob(Worker& worker) : worker_(worker) {}

    void prepare(const WorkList& list, std::int64_t layer, const Payload& payload);
    std::int64_t layer() const { return layer_; }
    const WorkList& list() const { return *list_; }
    void run(std::int64_t item, int thread) noexcept override;

  private:
    void append(const PlannedSpan& span, std::int64_t split, std::int64_t head) const;
    void attend(const PlannedSpan& span, std::int64_t split, std::int64_t head, int thread) const;
    void merge(const PlannedSpan& span, std::int64_t head, const float* partials, int thread) const;
    RowView rows_of(const PlannedSpan& span, std::int64_t head_dim) const;
    std::int64_t first_element(const PlannedSpan& span, std::int64_t head, std::int64_t head_dim) const;

    Worker& worker_;
    const WorkList* list_ = nullptr;
    const LayerSpec* spec_ = nullptr;
    std::int64_t layer_ = 0;
    Payload payload_{};
};

}  // namespace rworker
