// One recurrent layer of one mini-batch as a job for the pool.
#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <vector>

#include "rworker/layer_job.hpp"
#include "rworker/state_self_test.hpp"

namespace rworker {

/// An item is a head of a sequence, with all its rows. The last one of a group keeps what its heads share.
class StateJob final : public LayerJob {
  public:
    StateJob(const KVCache& cache, const StateKernels& kernels, DType dtype, int num_threads);

    /// Which rows come in this step, layer after layer.
    void plan(std::span<const Span> spans);
    void prepare(std::int64_t layer, const Payload& payload);
    void run(std::int64_t item, std::int64_t next_item, int thread) noexcept override;

  private:
    struct Rows {
        const std::int32_t* blocks;
        std::int64_t first, count, position;
    };

    StateChannels channels(std::int64_t first, std::int64_t dim, std::int64_t window, const Rows& rows,
                           std::vector<float*>& pointers) const;
    void matrix_of(std::int64_t item, std::vector<float*>& rows) const;
    void keep(const StateChannels& part, const Rows& rows) const;
    const void* payload_of(const Rows& rows) const;

    const KVCache& cache_;
    const StateKernels& kernels_;
    DType dtype_;
    const StateSpec* spec_ = nullptr;
    Payload payload_{};
    std::vector<Rows> rows_;
    std::unique_ptr<std::atomic<std::int32_t>[]> heads_left_;  // of each sequence and group
    std::size_t num_counters_ = 0;
    std::vector<std::vector<float>> scratch_;  // per thread
};

}  // namespace rworker
