// Multi-head latent attention whose products with K and V run on this R-worker. The first part of a query, times its
// head's K, becomes as long as a latent. The output over latents, times V, becomes the head's own output.
#pragma once

#include <cstdint>
#include <vector>

#include "rworker/layer_job.hpp"

namespace rworker {

/// K and V of all heads of a layer, in the layout that kernels read.
class HeadWeights {
  public:
    HeadWeights(const LayerSpec& layer, DType dtype);

    /// Sets the weights of heads [first, first + count): [count][nope + value][rank], in the model's dtype. Throws
    /// Error for heads that do not exist.
    void set(std::int64_t first, std::int64_t count, const void* rows);
    bool is_complete() const { return num_set_ == std::int64_t(is_set_.size()); }
    const void* keys(std::int64_t head) const { return bytes_.data() + head * head_bytes_; }
    const void* values(std::int64_t head) const { return bytes_.data() + head * head_bytes_ + keys_bytes_; }

  private:
    void set_head(std::int64_t head, const std::uint8_t* rows);

    std::int64_t nope_, rank_, value_, item_bytes_, keys_bytes_, head_bytes_, num_set_ = 0;
    std::vector<bool> is_set_;
    std::vector<std::uint8_t> bytes_;
};

/// Rows of all heads, [row][head][stride elements].
struct HeadRows {
    const void* in;
    void* out;
    DType in_dtype, out_dtype;
    std::int64_t num_rows, in_stride, out_stride;
    std::int64_t in_offset = 0, out_offset = 0;  // elements before the part that is multiplied
};

/// Multiplies rows of each head by its K or its V. It copies a row's further elements, which come after the multiplied
/// ones (K) or before them (V).
class HeadProductJob final : public LayerJob {
  public:
    HeadProductJob(const Kernels& kernels, int num_threads) : kernels_(kernels), scratch_(num_threads) {}

    /// Prepares the job for queries: q [row][head][sent_query_dim] → [row][head][key_dim].
    void prepare_queries(const LayerSpec& spec, const HeadWeights& weights, DType dtype, std::int64_t layer,
                         const void* queries, void* absorbed, std::int64_t num_rows);
    /// Prepares the job for outputs: o and partial results over latents → outputs and partial results of the heads.
    void prepare_outputs(const LayerSpec& spec, const HeadWeights& weights, DType dtype, std::int64_t layer,
                         const Payload& latents, const Payload& payload, std::int64_t num_rows,
                         std::int64_t num_partials);
    void run(std::int64_t item, std::int64_t next_item, int thread) noexcept override;

  private:
    void start(std::int64_t layer);
    void multiply(const HeadRows& rows, std::int64_t head, std::int64_t first, int thread);
    void copy(const HeadRows& rows, std::int64_t head, std::int64_t row) const;

    const Kernels& kernels_;
    const LayerSpec* spec_ = nullptr;
    const HeadWeights* weights_ = nullptr;
    DType dtype_ = DType::float32;
    bool is_of_queries_ = false;
    HeadRows parts_[2]{};
    std::vector<std::vector<float>> scratch_;  // per thread
};

/// The jobs before and after a latent layer's attention in one mini-batch, and the rows between them.
class Absorption {
  public:
    Absorption(const Kernels& kernels, DType dtype, int num_threads)
        : before(kernels, num_threads), after(kernels, num_threads), dtype_(dtype) {}

    /// Allocates memory for this many rows of each such layer.
    void reserve(const std::vector<LayerSpec>& layers, std::int64_t num_queries, std::int64_t num_out,
                 std::int64_t num_partials);
    /// Prepares both jobs. Returns the payload that attention reads and writes between them.
    Payload prepare(const LayerSpec& spec, const HeadWeights& weights, std::int64_t layer, const Payload& payload);

    HeadProductJob before, after;

  private:
    DType dtype_;
    std::int64_t num_queries_ = 0, num_out_ = 0, num_partials_ = 0;
    std::vector<std::uint8_t> queries_, out_;
    std::vector<float> partials_;
};

}  // namespace rworker
