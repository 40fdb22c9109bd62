// Block copies and cuts that a step's controls ask for. The pool's threads do them while the step is planned.
#pragma once

#include "rworker/layer_job.hpp"

namespace rworker {

/// One item per layer, so edits keep their order within a layer.
class EditJob final : public LayerJob {
  public:
    explicit EditJob(const KVCache& cache) : cache_(cache) {}
    /// Plans the edits that the step which has just begun asks for.
    void plan() { begin(0, std::int64_t(cache_.layers().size()), cache_.edit_bytes(), 0); }
    void run_all() {
        for (std::int64_t layer = 0; layer < num_items_; ++layer) cache_.edit_layer(layer);
    }
    void run(std::int64_t layer, std::int64_t, int) noexcept override { cache_.edit_layer(layer); }

  private:
    const KVCache& cache_;
};

}  // namespace rworker
