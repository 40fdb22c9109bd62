// One recurrent layer of one mini-batch as a job for the pool.
#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <vector>

#include "rworker/layer_job.hpp"
#include "rworker/state_self_test.hpp"

namespace rworker {

/// Address of the element `elements` after the first of `data`.
inline const void* advanced(const void* data, std::int64_t elements, DType dtype) {
    return static_cast<const std::uint8_t*>(data) + elements * item_bytes(dtype);
}

constexpr std::int64_t kLineFloats = 16;

/// The first float of `floats` at the start of a line of 64 bytes. `floats` has kLineFloats more elements than needed.
inline float* first_line(std::vector<float>& floats) {
    const auto place = reinterpret_cast<std::uintptr_t>(floats.data());
    return floats.data() + (64 - place % 64) % 64 / sizeof(float);
}

/// One recurrent layer's job. An item is a head of a sequence, or several heads that share queries and keys, with all
/// its rows. The last item of a group keeps the rows that its heads share.
class StateJob final : public LayerJob {
  public:
    StateJob(const KVCache& cache, const StateKernels& kernels, DType dtype, int num_threads);

    /// Plans the rows that arrive in this step, layer after layer.
    void plan(std::span<const Span> spans);
    /// Plans a step without rows: the state of one sequence is advanced by the first `count` rows that it lacks.
    void plan(std::int64_t sequence_id, std::int64_t count);
    /// Advances states by all rows that they lack, in a layer whose rows did not arrive.
    void settle(std::int64_t layer);
    std::int64_t num_items() const { return std::int64_t(rows_.size()) * spec_->heads / heads_per_item_; }
    void prepare(std::int64_t layer, const Payload& payload);
    void run(std::int64_t item, std::int64_t next_item, int thread) noexcept override;

  private:
    /// Rows of a span, after `position` tokens. The state lacks the `num_kept` rows before them.
    struct Rows {
        const std::int32_t* blocks;
        std::int64_t first, count, position;
        const std::uint8_t* kept;
        std::int64_t first_kept, num_kept;
        std::uint8_t* coming;  // where the rows are kept if they do not advance the state now; or null
        bool attends;          // false where the arriving rows have no place for outputs
        bool is_pending;       // the state lacks one row, of which key and matrix input are kept
    };
    struct Aside;
    /// Where the state of an item's head lies: rows of windows and, where needed, rows of the matrix.
    struct Head {
        std::int64_t number = -1;  // index among the heads of all sequences; -1: none
        std::vector<float*> query, key, value, matrix;
        std::vector<Stretch> value_window, other_windows, pieces;  // stretches of memory; `pieces` is the matrix
    };
    /// Whose query and key a thread's scratch holds; row -1: nobody's.
    struct Convolved {
        std::int64_t row = -1, group = -1;
        bool operator==(const Convolved&) const = default;
    };
    /// Inputs of single rows. Two buffers alternate between a head and the next one.
    struct Lone {
        std::vector<float> keys[2], values[2];  // queries and keys, values
        int key = 0, value = 0;                 // index of the buffer that was used last
        Convolved convolved;                    // whose query and key keys[key] holds
        std::int64_t made = -1;                 // number of the head whose inputs were made while the previous head ran
        StateArgs args;                         // arguments of that head
    };
    /// Buffers of one thread.
    struct alignas(64) Hand {
        std::vector<float> scratch, shared;
        Convolved convolved;
        Head here, next;
        std::vector<Stretch> next_reads;
        int num_next_inputs = 0;
        Lone lone;
    };

    void reserve_counters();
    std::int64_t find_heads_per_item() const;
    void run_head(std::int64_t number, std::int64_t next, int thread);
    void run_rows(std::int64_t number, Hand& hand) const;
    void run_lone(std::int64_t number, std::int64_t next, Hand& hand) const;
    bool is_lone(const Rows& rows) const { return spec_->has_matrix() && rows.attends && rows.count == 1; }
    StateArgs lone_args(std::int64_t number, const Head& at, Hand& hand) const;
    void add_pending(const Rows& rows, std::int64_t head, StateArgs& args) const;

    void find(std::int64_t number, Head& head) const;
    void find_rows(const std::int32_t* blocks, std::int64_t first, std::int64_t count, std::vector<float*>* rows,
                   std::vector<Stretch>& pieces) const;
    void find_matrix(Head& head) const;
    void look_ahead(std::int64_t number, Hand& hand) const;
    StateArgs args_of(const Rows& rows, const Head& at) const;
    StateChannels moved_on(const StateChannels& part, const Rows& rows, std::vector<float>& floats,
                           std::vector<float*>& pointers) const;
    void keep(const StateChannels& part, const void* payload, std::int64_t count, std::int64_t position) const;
    void keep(const StateChannels& part, const Rows& rows) const;
    void advance_kept(StateArgs args, const Rows& rows) const;
    void advance_silently(StateArgs args) const;
    void set_aside(float* const* matrix, Aside& aside) const;
    bool goes_together(const Rows& rows) const;
    void put_together(const Rows& rows, StateArgs& args) const;
    void set_apart(const Rows& rows, bool computes, const StateArgs& here, Aside& aside, StateArgs& args) const;
    const void* payload_of(const Rows& rows) const;
    const void* kept_of(const Rows& rows) const;
    std::int64_t row_bytes() const { return spec_->row_elements(item_bytes(dtype_)) * item_bytes(dtype_); }

    const KVCache& cache_;
    const StateKernels& kernels_;
    DType dtype_;
    const StateSpec* spec_ = nullptr;
    std::int64_t heads_per_item_ = 1;
    Payload payload_{};
    std::vector<Rows> rows_;
    std::unique_ptr<std::atomic<std::int32_t>[]> heads_left_;  // of each sequence and group
    std::size_t num_counters_ = 0;
    std::vector<Hand> hands_;
};

/// Advances the state of a sequence to its first `num_tokens` tokens, by rows that it lacks.
void settle_state(KVCache& cache, const StateKernels& kernels, DType dtype, std::int64_t sequence_id, std::int64_t num_tokens);

}  // namespace rworker
