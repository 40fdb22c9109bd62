// How the attention of one query is distributed over blocks of tokens. For rows that ask for it, it is a second pass
// over the keys.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "rworker/layer_job.hpp"
#include "rworker/picks.hpp"

namespace rworker {

/// A query of the open step, of one sequence or of one range of a longer one.
struct WeighQuery {
    std::int64_t sequence_id;
    std::int64_t position;  // of the query, from the sequence's first token; after the end of a closed range
    std::int64_t offset;    // position of the range's first token in the sequence
    std::int64_t block;     // tokens of a block; blocks begin at multiples of it, with `offset` included
    std::vector<std::int64_t> layers;   // ascending; an index layer among them picks for the layers that use its picks
    std::vector<const void*> queries;   // of each layer: [num_heads][sent_query_dim], in the model's dtype
    const float* norms = nullptr;  // [attending heads][2]: max and sum; null: of the tokens here and sinks
};

class Worker;

/// One item is several query heads of one KV head of a layer.
class WeighJob final : public LayerJob {
  public:
    /// Throws Error for a query that is not possible. The query's arrays must stay valid.
    WeighJob(Worker& worker, const WeighQuery& query);

    std::int64_t num_blocks() const { return num_blocks_; }
    std::int64_t num_heads() const { return num_heads_; }  // of all layers with attention
    /// Computes weights [num_blocks]: the mean over heads, then over layers. Together with the weights of sinks they
    /// sum to 1.
    void weigh(float* weights);
    /// Computes max and sum [num_heads][2] of the tokens here, without sinks.
    void find_norms(float* norms);
    void run(std::int64_t item, std::int64_t next_item, int thread) noexcept override;

  private:
    static constexpr std::int64_t kHeadsTogether = 8;

    struct Item {
        std::size_t layer;                   // index in WeighQuery::layers
        std::int64_t kv_head, first, count;  // query heads, counted within the KV head's group
        std::int64_t row;                    // of the first head, among all heads
    };

    const LayerSpec& spec_of(std::size_t layer) const;
    void check() const;
    void add_items();
    void absorb();
    void pick(std::size_t layer);
    void start();
    void score(const Item& item, int thread);
    void score_picked(const Item& item, int thread);
    void score_split(const Item& item, const HeadView& view, std::int64_t split, std::int64_t end, std::int64_t position,
                     std::int64_t first_seen, float* scores, int thread);
    void hide_unpicked(const Item& item, int thread);
    std::int64_t first_seen(const LayerSpec& spec) const;
    void finish(const Item& item, std::int64_t head, int thread);
    double add_blocks(const float* weights, std::int64_t begin, std::int64_t end, int thread);

    Worker& worker_;
    const WeighQuery& query_;
    const std::vector<std::int32_t>* blocks_ = nullptr;
    std::int64_t stored_ = 0, seen_ = 0, stride_ = 0;  // tokens here, tokens up to the query, and their room
    std::int64_t first_block_ = 0, num_blocks_ = 0, num_heads_ = 0, num_attending_ = 0;
    float* norms_ = nullptr;  // output, or null
    std::vector<Item> items_;
    std::vector<const void*> queries_;                  // multiplied by K, where layers absorb
    std::vector<std::vector<std::uint8_t>> absorbed_;
    std::vector<Picks> picks_;                          // of each index layer, else unused
    std::vector<std::vector<float>> rows_, picked_;     // per thread: [kHeadsTogether][stride_]
    std::vector<std::vector<double>> sums_;             // per thread: of one head's blocks
    // Per thread, as multiples of kUnit: integer sums do not depend on which thread added which part.
    std::vector<std::vector<std::int64_t>> totals_;
};

}  // namespace rworker
