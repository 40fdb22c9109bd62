// An R-worker: a KV cache, and the kernels and threads that compute attention over it, step by step.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "rworker/block_reading.hpp"
#include "rworker/absorption.hpp"
#include "rworker/commit_ahead.hpp"
#include "rworker/edit_job.hpp"
#include "rworker/kv_cache.hpp"
#include "rworker/layer_job.hpp"
#include "rworker/picks.hpp"
#include "rworker/step_plan.hpp"
#include "rworker/thread_pool.hpp"

namespace rworker {

struct WorkerConfig {
    std::vector<LayerSpec> layers;
    DType model_dtype, kv_dtype;
    std::int64_t block_size, num_blocks;
    int num_threads;
    std::vector<int> cores;
    std::string isa;
    ReadAhead read_ahead = ReadAhead::run;
};

/// Rows of a mini-batch in the open step: of queries, of keys and values, of out, and of partial results (one per
/// node). `own`: rows that are stored and attend, whichever results they get.
struct RowCount {
    std::int64_t queries = 0, stored = 0, out = 0, partials = 0, own = 0;

    bool any() const { return queries + stored > 0; }
    /// The rows of one layer: a recurrent one gets no rows that read closed ranges, and answers each of its own rows.
    RowCount of(const LayerSpec& layer) const { return layer.state() ? RowCount{own, stored, own, 0, own} : *this; }
};

/// A row at `position` of a sequence or segment, whose attention in one layer is computed again. `mode`: attend, partial
/// or read, as the row's span had.
struct Again {
    std::int64_t sequence_id, layer, position;
    SpanMode mode;
};

struct StepReport {
    std::vector<double> busy_start, busy_end;  // [mini-batch][layer], seconds; 0 where nothing ran
    std::int64_t bytes_read, blocks_free;
};

/// What the cache holds, and counts since the start; `tokens` counts tokens of shared blocks once per sequence.
struct Statistics {
    std::int64_t blocks_used, blocks_free, blocks_shared, sequences;
    std::int64_t incoming;  // of sequences whose rows have not all arrived
    std::int64_t tokens;
    std::int64_t bytes_read;       // of keys and values, in all steps
    std::int64_t bytes_committed;  // of all blocks that were ever used or are committed ahead
};

/// Returns `config` if it is valid. Throws Error where its numbers do not fit each other.
WorkerConfig checked(WorkerConfig config);
/// Throws Error where modes are unknown or out of order.
void check_order(std::span<const std::vector<Span>> mini_batches);

class AttentionJob;
class StateJob;

/// Only one thread may call its methods. Exceptions: `store`, `read_prefix`, and the checks of `cache()` before these.
/// Every mistake throws an Error and leaves the worker unchanged.
class Worker {
  public:
    explicit Worker(WorkerConfig config);
    ~Worker();

    const KVCache& cache() const { return cache_; }
    const Kernels& kernels() const { return kernels_; }
    DType model_dtype() const { return model_dtype_; }
    int num_threads() const { return pool_.num_threads(); }

    /// Sets K and V of heads [first_head, first_head + num_heads) of a layer that absorbs: see HeadWeights. Throws
    /// Error for another layer, for other heads, or while a step is open.
    void set_weights(std::int64_t layer, std::int64_t first_head, std::int64_t num_heads, const void* rows);
    /// Applies the controls and plans the rows of every mini-batch. Spans come in the order read, attend, partial,
    /// append.
    void begin_step(std::span<const Control> controls, std::span<const std::vector<Span>> mini_batches);
    /// Returns the row counts of a mini-batch of the open step. Throws Error for an invalid mini_batch or layer, or
    /// without an open step.
    RowCount row_count(std::int64_t mini_batch, std::int64_t layer) const;
    /// Throws Error unless this mini-batch and layer may be submitted now.
    void check_submit(std::int64_t mini_batch, std::int64_t layer) const;
    /// Stores keys [stored rows, num_kv_heads, key_dim] and values. Computes attention of queries [rows, num_heads,
    /// key_dim], of all spans except `append`, into out [rows of `attend` spans, num_heads, value_dim] and partials. It
    /// returns at once, or when the job is done if that takes no longer than waking a thread. The buffers are in use
    /// until wait.
    void submit(std::int64_t mini_batch, std::int64_t layer, const Payload& payload);
    /// Submits and waits at once, on the calling thread with the pool's helpers, so that no leader must be woken. No
    /// job may be running.
    void run(std::int64_t mini_batch, std::int64_t layer, const Payload& payload);
    /// Call it after an index layer, where rows have ranges here. It sets how many of the ranks from each range the
    /// queries picked: counts [rows of partial results][LayerSpec::pick_heads], those of a row's first node, as
    /// share_picks finds them.
    void share(std::int64_t mini_batch, std::int64_t layer, std::span<const std::int32_t> counts);
    bool ready(std::int64_t mini_batch) const;
    void wait(std::int64_t mini_batch);
    /// Commits the rows. Every layer of every mini-batch with rows must have been submitted and waited for.
    StepReport end_step();
    /// Waits for running jobs, then drops the rows of the step.
    void abandon_step();
    bool in_step() const { return in_step_; }

    /// Exports and imports committed tokens as bytes; see KVCache. Throws Error while a step is open.
    std::int64_t export_bytes(std::int64_t sequence_id, std::int64_t start, std::int64_t num_tokens) const;
    /// Rows that the state lacks before the last token are applied first.
    void export_sequence(std::int64_t sequence_id, std::int64_t start, std::int64_t num_tokens, std::uint8_t* out);
    void import_sequence(std::int64_t sequence_id, std::int64_t start, std::int64_t num_tokens,
                         std::span<const std::uint8_t> data);
    /// Exports and imports whole blocks as they lie here; see KVCache. Throws Error while a step is open.
    std::int64_t blocks_bytes(std::int64_t sequence_id, std::int64_t start, std::int64_t num_tokens) const;
    void export_blocks(std::int64_t sequence_id, std::int64_t start, std::int64_t num_tokens, std::uint8_t* out) const;
    void import_blocks(std::int64_t sequence_id, std::int64_t start, std::int64_t num_tokens,
                       std::span<const std::uint8_t> data);
    /// Reads whole blocks, which `pieces` of the open file `fd` hold, into a sequence or a new one; each thread of this
    /// worker reads one piece at a time. Returns 0, or the error of a piece that was not read (see ReadJob). In any
    /// case the sequence then has all these tokens, whether right or not, and the pieces have the checksums of what was
    /// read. Throws Error as `import_blocks` does, and then nothing has changed.
    int read_blocks(std::int64_t sequence_id, std::int64_t start, int fd, std::span<FilePiece> pieces);
    /// Commits memory ahead while no step is open. Beyond the blocks in use, it commits the largest of: `least` blocks,
    /// one block per sequence of the last step, half as many blocks as were ever used. Call it between steps.
    void commit_ahead(std::int64_t least);
    /// Stores rows of an incoming sequence, [num_rows, num_kv_heads, key_dim or value_dim] in the model's dtype; see
    /// KVCache. Any thread may call it while others take steps.
    void store(std::int64_t job_id, std::int64_t layer, const IncomingRows& rows);
    void store_state(std::int64_t job_id, std::int64_t layer, std::span<const std::uint8_t> data) {
        cache_.store_state(job_id, layer, data);
    }
    /// Reads rows of the prefix of an incoming sequence, in `rows.dtype`.
    void read_prefix(std::int64_t job_id, std::int64_t layer, const OutgoingRows& rows) const {
        cache_.read_prefix(job_id, layer, rows);
    }
    /// Rows of out and of partial results that `attend_again` fills. Throws Error for a row that is not stored, for a
    /// layer that does not attend to all tokens, or while a layer of the step is missing.
    RowCount rows_again(const Again& asked) const;
    /// Computes the attention of one stored row again, bit for bit as in its step. Nothing is stored.
    void attend_again(const Again& asked, const void* query, void* out, float* partials);
    /// Exports one layer of all tokens of a sequence, those of the open step included.
    std::int64_t layer_bytes(std::int64_t sequence_id, std::int64_t layer, bool as_blocks) const;
    void export_layer(std::int64_t sequence_id, std::int64_t layer, bool as_blocks, std::uint8_t* out) const;
    void keep_checksums() { cache_.keep_checksums(); }
    Statistics statistics() const;

  private:
    struct MiniBatch {
        RowCount rows;
        std::vector<std::unique_ptr<WorkList>> lists;  // per shape
        std::vector<char> submitted;                   // per layer
        std::vector<LayerJob*> jobs = {};              // of the layer that was submitted last, in order
        bool outstanding = false;
    };

    friend class AttentionJob;
    friend class WeighJob;
    void plan(std::span<const std::vector<Span>> mini_batches);
    void aim_ahead();
    const MiniBatch& mini_batch_at(std::int64_t index) const;
    void prepare(std::int64_t mini_batch, std::int64_t layer, Payload payload);
    void check_weights() const;
    void finish(std::int64_t mini_batch);
    bool idle() const;
    void unwrite(const MiniBatch& mini_batch) const;
    void settle_others();
    void check_all_done(const std::string& what) const;
    void check_again(const char* what, std::int64_t sequence_id, std::int64_t layer) const;
    Span span_again(const Again& asked) const;

    KVCache cache_;
    const Kernels& kernels_;
    ReadAhead read_ahead_;
    DType model_dtype_;
    std::vector<std::int64_t> shape_of_layer_;  // layers with the same work share a work list; -1: a recurrent layer
    std::vector<std::int64_t> shapes_;          // a layer of each shape

    bool in_step_ = false;
    std::vector<MiniBatch> mini_batches_;
    StepReport report_;
    std::int64_t bytes_read_ = 0;                      // by all steps
    std::vector<float> shared_partials_;               // of the running job
    std::vector<std::vector<float>> own_partials_;     // per thread
    std::vector<std::vector<float>> scratch_;          // per thread
    std::vector<std::vector<std::uint8_t>> split_values_;  // per thread; empty where all values are stored
    std::vector<PickedRows> picked_rows_;  // per thread
    std::vector<std::unique_ptr<AttentionJob>> jobs_;  // one per mini-batch
    std::vector<std::unique_ptr<StateJob>> state_jobs_;  // the same, where layers are recurrent
    std::vector<std::unique_ptr<HeadWeights>> weights_;  // per layer; null where queries arrive absorbed
    std::vector<std::unique_ptr<Absorption>> absorptions_;  // one per mini-batch, where layers absorb
    EditJob edits_;
    ThreadPool pool_;                                  // its threads end before what they use is destroyed
    std::int64_t least_ahead_ = -1;                    // blocks to commit ahead; -1: none
    CommitAhead ahead_;                                // last, for the same reason
};

}  // namespace rworker
