// Paged keys and values of many sequences, and the tables that say whose they are.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "rworker/arena.hpp"
#include "rworker/block_pool.hpp"
#include "rworker/incoming.hpp"
#include "rworker/layout.hpp"
#include "rworker/state_places.hpp"
#include "rworker/types.hpp"

namespace rworker {

/// Payload rows, layer after layer, of the last step of a sequence that may be taken back: its state is advanced by
/// those that stay once the next step's rows come. Forks share them.
using KeptRows = std::shared_ptr<std::uint8_t[]>;

/// A sequence of t tokens holds ceil(t / block_size) blocks, each covering all layers. Full blocks may be shared
/// between sequences; a partial last block never is, so appending needs no copy.
struct Sequence {
    std::vector<std::int32_t> blocks;
    std::int64_t length = 0;          // committed tokens
    std::int64_t pending_length = 0;  // with the rows of the open step
    bool born_in_step = false;
    std::vector<std::int32_t> state_blocks = {};  // of its own, where layers are recurrent
    KeptRows kept = {}, coming = {};              // rows its state lacks so far, and those of the open step it will lack
    KeptRows spare = {};                          // memory for those of the next step
    std::int64_t first_kept = 0, num_kept = 0;    // of `kept`, those that a truncate left
    bool kept_lone = false, coming_lone = false;  // a single row that attends: it leaves what the matrix takes by it
    bool state_spoilt = false;                    // by a step that was abandoned
    std::optional<std::int64_t> job_id = {};  // while it is incoming: rows from `length` on come from prefill workers
};

/// Most tokens of a block; where no layer attends tokens leave nothing in it, so that it may have more of them, but not
/// more rows of states.
constexpr std::int64_t kMostBlockRows = 256, kMostBlockTokens = std::int64_t(1) << 30;

/// Bytes that one block of block_size tokens takes over all layers.
std::int64_t block_bytes(const std::vector<LayerSpec>& layers, DType dtype, std::int64_t block_size);
/// Blocks that the state of one sequence takes.
std::int64_t state_blocks(const std::vector<LayerSpec>& layers, DType dtype, std::int64_t block_size);

class KVCache {
  public:
    KVCache(std::vector<LayerSpec> layers, DType dtype, std::int64_t block_size, std::int64_t num_blocks);

    const std::vector<LayerSpec>& layers() const { return layers_; }
    const LayerLayout& layout(std::int64_t layer) const { return layouts_[layer]; }
    const BlockPool& pool() const { return pool_; }
    DType dtype() const { return dtype_; }
    std::int64_t block_size() const { return block_size_; }
    std::int64_t block_bytes() const { return block_bytes_; }  // over all layers
    const StatePlaces& states() const { return states_; }
    /// A row of the state in these blocks, or as many as `out` holds.
    float* state_row(const std::int32_t* blocks, std::int64_t index) const {
        return states_.row(arena_.data(), blocks, index);
    }
    template <class Each>
    void state_pieces(const std::int32_t* blocks, std::int64_t first, std::int64_t count, Each each) const {
        states_.pieces(arena_.data(), blocks, first, count, each);
    }

    /// Apply the controls, then take blocks for the rows of all spans. On an error nothing has changed. What the
    /// controls do to the data of blocks is left to `edit_layer`, but where other threads may store into them.
    void begin_step(std::span<const Control> controls, std::span<const Span> spans);
    /// About as many bytes as could be read while the controls' edits are done in all layers.
    std::int64_t edit_bytes() const;
    /// Do them in one layer, before anything reads or writes it; layers may be edited side by side.
    void edit_layer(std::int64_t layer) const;
    /// The rows of the step are written: lengths grow.
    void commit_step();
    /// Back to what the controls left: blocks taken for rows return, sequences born in the step vanish. States that
    /// were `written` are spoilt: of those sequences nothing but a release is possible; but where the step's rows were
    /// kept, and all layers advanced by those before them, the states are those of all committed tokens.
    void abandon_step(bool written = false);
    /// Before that, for each span and layer whose rows are written: the tile they filled up has rows again.
    void unwrite(std::int64_t layer, const std::int32_t* blocks, std::int64_t context_len, std::int64_t end) const;

    /// Throws UnknownSequence.
    const Sequence& sequence(std::int64_t sequence_id) const;
    /// The same; Error too where it is incoming.
    const Sequence& whole_sequence(std::int64_t sequence_id) const;
    std::vector<std::int64_t> sequence_ids() const;  // ascending
    std::vector<std::int64_t> incoming_ids() const;  // of sequences that are incoming, ascending

    /// Error, or UnknownSequence for the job, unless these rows of an incoming sequence may be stored. Like the other
    /// methods up to `num_incoming`, and nothing else of this class, it may be called from another thread at any time.
    void check_store(std::int64_t job_id, std::int64_t layer, std::int64_t start, std::int64_t num_rows) const;
    /// Store rows of an incoming sequence as one of `append` does; in any order, each row once. Controls that open, commit or
    /// release incoming sequences wait for a slice of it at most, and may end it with an UnknownSequence.
    void store(std::int64_t job_id, std::int64_t layer, const IncomingRows& rows, const AppendKernel* append);
    /// The state of an incoming sequence after all its tokens, in one layer: what `export_sequence` writes of that layer.
    void store_state(std::int64_t job_id, std::int64_t layer, std::span<const std::uint8_t> data);
    /// The same for reading what an incoming sequence has from before: tokens of the one it was forked from.
    void check_read(std::int64_t job_id, std::int64_t layer, std::int64_t start, std::int64_t num_rows) const;
    /// Read such rows as they are stored. Controls wait and end it as they do a `store`.
    void read_prefix(std::int64_t job_id, std::int64_t layer, const OutgoingRows& rows) const;
    std::int64_t num_incoming() const;

    HeadView view(std::int64_t layer, std::int64_t kv_head, const std::int32_t* blocks) const;
    /// All committed tokens of a sequence in one layer, dequantised and rotated back: [length, num_kv_heads, key_dim or
    /// value_dim].
    void read_tokens(std::int64_t sequence_id, std::int64_t layer, float* keys, float* values) const;

    /// Bytes that `export_sequence` writes of so many tokens: for each layer, for each token, keys [num_kv_heads,
    /// key_dim] and then values [num_kv_heads, value_dim], as stored (see TokenCodec). Where layers are recurrent, the
    /// state follows the last token of a sequence.
    std::int64_t sequence_bytes(std::int64_t num_tokens) const;
    /// Of one token in one layer.
    std::int64_t token_bytes(std::int64_t layer) const;
    /// `num_tokens` committed tokens of a sequence from token `start` on.
    void export_sequence(std::int64_t sequence_id, std::int64_t start, std::int64_t num_tokens, std::uint8_t* out) const;
    /// Error unless the sequence has these tokens.
    void check_export(std::int64_t sequence_id, std::int64_t start, std::int64_t num_tokens) const;
    /// True where the state of a sequence is, or can be advanced to, that after its first `num_tokens` tokens.
    bool has_state_at(std::int64_t sequence_id, std::int64_t num_tokens) const;
    /// Fewest tokens to which a sequence can be cut: more than it has where its state is spoilt.
    std::int64_t least_length(std::int64_t sequence_id) const;
    /// The state of a sequence has been advanced by the first `count` of the rows kept.
    void settled(std::int64_t sequence_id, std::int64_t count);
    /// A new sequence from what a cache of the same layers and dtype exported; from `start` > 0 on, whole blocks, more
    /// tokens of one that has exactly those before. On an error nothing has changed.
    void import_sequence(std::int64_t sequence_id, std::int64_t start, std::int64_t num_tokens,
                         std::span<const std::uint8_t> data);
    /// Bytes of whole blocks as they lie here: for each layer, for each block. Error where these tokens are none, or
    /// where layers are recurrent.
    std::int64_t blocks_bytes(std::int64_t start, std::int64_t num_tokens) const;
    /// Like `export_sequence` and `import_sequence`, of whole blocks, for caches of the same block size and instruction
    /// set only.
    void export_blocks(std::int64_t sequence_id, std::int64_t start, std::int64_t num_tokens, std::uint8_t* out) const;
    void import_blocks(std::int64_t sequence_id, std::int64_t start, std::int64_t num_tokens,
                       std::span<const std::uint8_t> data);
    /// As `import_blocks`, of blocks that are to be written later, whatever lies in them now.
    void place_blocks(std::int64_t sequence_id, std::int64_t start, std::int64_t num_tokens);
    /// Where these whole blocks lie, in the order of `export_blocks`.
    std::vector<std::span<std::uint8_t>> block_runs(std::int64_t sequence_id, std::int64_t start,
                                                    std::int64_t num_tokens) const;
    /// Commit the memory of blocks, used or not, before it is wanted; from any thread, while others use the cache.
    void commit_blocks(std::int64_t first, std::int64_t count) const;

  private:
    void check_import(std::int64_t sequence_id, std::int64_t start, std::int64_t num_tokens) const;
    Sequence& grown(std::int64_t sequence_id, std::int64_t length, bool cleared);
    void clear_block(std::int32_t block) const;
    void apply(const Control& control);
    void fork(const Control& control);
    void truncate(const Control& control);
    void release(const Control& control);
    void reserve(const Control& control);
    void commit(const Control& control);
    std::unique_lock<std::mutex> lock_incoming(std::span<const Control> controls);
    const Incoming& incoming(std::int64_t job_id) const;
    std::int64_t slice_rows(std::int64_t layer, DType dtype) const;
    std::lock_guard<std::mutex> let_controls_go_first() const;
    void read_slice(const Incoming& job, std::int64_t layer, const OutgoingRows& rows, std::int64_t start,
                    std::int64_t end) const;
    void store_slice(Incoming& job, std::int64_t layer, const IncomingRows& rows, const AppendKernel* append) const;
    void stage(Incoming& job, std::int64_t layer, const IncomingRows& rows, const AppendKernel* append) const;
    void write_rows(const Incoming& job, std::int64_t layer, const IncomingRows& rows, const AppendKernel* append) const;
    void copy_state(const Sequence& sequence, std::uint8_t* out) const;
    void set_state(const Sequence& sequence, const std::uint8_t* data) const;
    void take_state(Sequence& sequence);
    void grow(const Span& span);
    void check_read(const Span& span) const;
    void remember(std::int64_t sequence_id);
    void copy_block(std::int64_t layer, std::int32_t from, std::int32_t to) const;
    void turn_to_rows(std::int64_t layer, std::int32_t block, std::int64_t tile) const;
    std::int64_t tile_cut(std::int64_t num_tokens, std::int64_t length) const;
    template <class F>
    void for_each_token(const Sequence& sequence, std::int64_t layer, std::int64_t start, std::int64_t end, F f) const;
    template <class Bytes, class F>
    void walk_bytes(const Sequence& sequence, std::int64_t start, std::int64_t end, Bytes* bytes, F f) const;
    std::int64_t blocks_for(std::int64_t tokens) const { return (tokens + block_size_ - 1) / block_size_; }

    std::vector<LayerSpec> layers_;
    DType dtype_;
    std::int64_t block_size_, block_bytes_ = 0;
    std::vector<LayerLayout> layouts_;
    StatePlaces states_;
    BlockPool pool_;
    Arena arena_;
    std::unordered_map<std::int64_t, Sequence> sequences_;

    mutable std::mutex incoming_mutex_;              // of the next line, and of the blocks that are incoming
    std::unordered_map<std::int64_t, Incoming> incoming_;  // by job id
    std::atomic<int> controls_waiting_ = 0;          // for the mutex; a store lets them go first

    /// What happens to a block's data: a copy of another, unless it is its own; then a tile's keys turned to rows.
    struct BlockEdit {
        std::int32_t from, to;
        std::int64_t tile;  // -1: none
    };

    // Of the open step. Blocks are edited only once the whole step is known to be good: until then a block that a
    // control freed still holds its data, and undoing is a matter of tables.
    std::vector<std::pair<std::int64_t, std::optional<Sequence>>> before_;  // sequences the controls touched
    std::vector<BlockEdit> edits_;                                          // in their order
    std::vector<std::int64_t> grown_;                                       // sequence ids of the spans
    std::unordered_map<std::int64_t, Incoming> opened_;                     // jobs, by the controls
    std::vector<std::int64_t> closed_;                                      // jobs that they committed or released
    std::size_t log_size_after_controls_ = 0;
};

}  // namespace rworker
