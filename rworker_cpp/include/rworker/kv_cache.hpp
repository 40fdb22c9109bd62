// Paged keys and values of many sequences, and the tables that say which blocks each sequence holds.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "rworker/arena.hpp"
#include "rworker/block_checksums.hpp"
#include "rworker/block_pool.hpp"
#include "rworker/incoming.hpp"
#include "rworker/layout.hpp"
#include "rworker/state_places.hpp"
#include "rworker/types.hpp"

namespace rworker {

/// Payload rows, layer after layer, of a sequence's last step, which a truncate may partly undo. When the next step's
/// rows arrive, the remaining rows advance the state. Forks share them.
using KeptRows = std::shared_ptr<std::uint8_t[]>;

/// A sequence of t tokens holds ceil(t / block_size) blocks, each for all layers. Sequences may share full blocks. A
/// partial last block is never shared, so appending needs no copy.
struct Sequence {
    std::vector<std::int32_t> blocks;
    std::int64_t length = 0;          // committed tokens
    std::int64_t pending_length = 0;  // with the rows of the open step
    bool born_in_step = false;
    std::vector<std::int32_t> state_blocks = {};  // blocks of its own state, where layers are recurrent
    KeptRows kept = {}, coming = {};              // rows that its state still lacks; those of the open step
    KeptRows spare = {};                          // memory for such rows of the next step
    std::int64_t first_kept = 0, num_kept = 0;    // the rows of `kept` that a truncate left
    bool kept_lone = false, coming_lone = false;  // one attending row, of which key and matrix input are kept
    bool state_spoilt = false;                    // by an abandoned step
    std::int64_t state_base = 0;  // tokens before the sequence's first that its state covers: of earlier segments
    std::optional<std::int64_t> job_id = {};  // set while rows from `length` on arrive from prefill workers
};

/// Returns the name of a sequence in error messages.
inline std::string name_of(std::int64_t sequence_id) { return "sequence " + std::to_string(sequence_id); }

/// Most tokens of a block. Where no layer has attention, tokens need no room in a block, so it may count more tokens,
/// but it has no more rows of states.
constexpr std::int64_t kMostBlockRows = 256, kMostBlockTokens = std::int64_t(1) << 30;

/// Bytes that one block of block_size tokens takes over all layers.
std::int64_t block_bytes(const std::vector<LayerSpec>& layers, DType dtype, std::int64_t block_size);
/// Number of blocks that the state of one sequence takes.
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
    /// A row of the state in these blocks, or several: as many as `out` holds.
    float* state_row(const std::int32_t* blocks, std::int64_t index) const {
        return states_.row(arena_.data(), blocks, index);
    }
    template <class Each>
    void state_pieces(const std::int32_t* blocks, std::int64_t first, std::int64_t count, Each each) const {
        states_.pieces(arena_.data(), blocks, first, count, each);
    }

    /// Applies the controls, then takes blocks for the rows of all spans. On an error nothing changes. `edit_layer`
    /// later copies or cuts the data of blocks; begin_step does so itself only where other threads may store into them.
    void begin_step(std::span<const Control> controls, std::span<const Span> spans);
    /// Bytes that could be read in the time that the controls' edits take in all layers, roughly.
    std::int64_t edit_bytes() const;
    /// Does the edits in one layer, before anything reads or writes that layer. Several layers may be edited at once.
    void edit_layer(std::int64_t layer) const;
    /// Commits the rows of the step once they are written: lengths grow.
    void commit_step();
    /// Returns to the state after the controls: blocks taken for rows return, and sequences that the step created
    /// vanish. States that were `written` are spoilt: such a sequence can only be released. Where the step's rows were
    /// kept, and all layers were advanced by the rows before them, states match all committed tokens.
    void abandon_step(bool written = false);
    /// Call it before abandon_step, for each span and layer whose rows are written. It turns the tile that they filled
    /// into rows again.
    void unwrite(std::int64_t layer, const std::int32_t* blocks, std::int64_t context_len, std::int64_t end) const;

    /// Throws Error unless a `read` span may be planned.
    void check_read(const Span& span) const;
    /// Throws UnknownSequence.
    const Sequence& sequence(std::int64_t sequence_id) const;
    /// Like `sequence`, but throws Error also if the sequence is incoming.
    const Sequence& whole_sequence(std::int64_t sequence_id) const;
    std::vector<std::int64_t> sequence_ids() const;  // ascending
    std::vector<std::int64_t> incoming_ids() const;  // of sequences that are incoming, ascending

    /// Throws Error, or UnknownSequence for the job, unless these rows of an incoming sequence may be stored. This
    /// method and those up to `num_incoming` may be called from another thread at any time; no other method of this
    /// class may.
    void check_store(std::int64_t job_id, std::int64_t layer, std::int64_t start, std::int64_t num_rows) const;
    /// Stores rows of an incoming sequence as `append` does, in any order, each row once. Controls that open, commit or
    /// release incoming sequences wait for one slice of rows at most. They may end this call with UnknownSequence.
    void store(std::int64_t job_id, std::int64_t layer, const IncomingRows& rows, const AppendKernel* append);
    /// Stores the state of an incoming sequence after all its tokens, in one layer: the bytes that `export_sequence`
    /// writes for that layer.
    void store_state(std::int64_t job_id, std::int64_t layer, std::span<const std::uint8_t> data);
    /// Throws Error, or UnknownSequence for the job, unless these tokens may be read, which an incoming sequence has
    /// from the sequence that it was forked from.
    void check_read(std::int64_t job_id, std::int64_t layer, std::int64_t start, std::int64_t num_rows) const;
    /// Reads these tokens' rows as they are stored. As with `store`, controls may wait for a slice or end the call.
    void read_prefix(std::int64_t job_id, std::int64_t layer, const OutgoingRows& rows) const;
    std::int64_t num_incoming() const;

    HeadView view(std::int64_t layer, std::int64_t kv_head, const std::int32_t* blocks) const;
    /// Reads all committed tokens of a sequence in one layer, dequantised and rotated back: [length, num_kv_heads,
    /// key_dim or value_dim].
    void read_tokens(std::int64_t sequence_id, std::int64_t layer, float* keys, float* values) const;

    /// Bytes that `export_sequence` writes for this many tokens. For each layer and each token these are keys
    /// [num_kv_heads, key_dim] and then values [num_kv_heads, value_dim], as stored (see TokenCodec). Where layers are
    /// recurrent, the state follows the last token of a sequence.
    std::int64_t sequence_bytes(std::int64_t num_tokens) const;
    /// Bytes of one token in one layer.
    std::int64_t token_bytes(std::int64_t layer) const;
    /// Exports all tokens of one layer of a sequence, those of the open step included, as `export_sequence` does. With
    /// `as_blocks`, full blocks come first, as `export_blocks` does, and then the tokens of the last block.
    void export_layer(std::int64_t sequence_id, std::int64_t layer, bool as_blocks, std::uint8_t* out) const;
    /// Keeps, from now on, a checksum of every full block in every layer. Call it before the first step.
    void keep_checksums();
    /// Returns the first of the full blocks of a sequence's first `num_tokens` tokens that differs from its checksum in
    /// `layer`, or in any layer where that is negative; -1: none differs. Negative `num_tokens`: all committed tokens.
    std::int64_t find_damage(std::int64_t sequence_id, std::int64_t num_tokens, std::int64_t layer) const;
    /// Flips a bit of the block that holds a token, for tests of `find_damage`.
    void flip_bit(std::int64_t sequence_id, std::int64_t layer, std::int64_t token, std::int64_t bit) const;
    /// Takes checksums of the full blocks of a sequence from token `start` on, where they are kept.
    void note_full(std::int64_t sequence_id, std::int64_t start);
    /// Exports `num_tokens` committed tokens of a sequence, from token `start` on.
    void export_sequence(std::int64_t sequence_id, std::int64_t start, std::int64_t num_tokens, std::uint8_t* out) const;
    /// Throws Error unless the sequence has these tokens.
    void check_export(std::int64_t sequence_id, std::int64_t start, std::int64_t num_tokens) const;
    /// True if a sequence's state is valid, and is or can be advanced to the state after `num_tokens` tokens.
    bool has_state_at(std::int64_t sequence_id, std::int64_t num_tokens) const;
    /// Bytes that `export_sequence` writes for the state after `num_tokens` tokens, which is the state itself and, for a
    /// later segment of a sequence, the number of tokens before that segment; 0 without this state.
    std::int64_t state_bytes(std::int64_t sequence_id, std::int64_t num_tokens) const;
    /// Fewest tokens to which a sequence can be cut. It is more than the sequence's length where the state is spoilt.
    std::int64_t least_length(std::int64_t sequence_id) const;
    /// Notes that the state of a sequence was advanced by the first `count` of its kept rows.
    void settled(std::int64_t sequence_id, std::int64_t count);
    /// Creates a sequence from the export of a cache with the same layers and dtype. With `start` > 0 it adds whole
    /// blocks to a sequence that has exactly the tokens before. No tokens with `start` > 0 create a later segment, which
    /// begins from the state `data` after `start` tokens; it lives on only if the next step adds rows to it. On an error
    /// nothing changes.
    void import_sequence(std::int64_t sequence_id, std::int64_t start, std::int64_t num_tokens,
                         std::span<const std::uint8_t> data);
    /// Call it at the end of a step: drops segments that have a state and, still, no tokens.
    void drop_unbegun();
    /// Bytes of whole blocks as they lie here: for each layer, for each block. Throws Error where these tokens are no
    /// whole blocks.
    std::int64_t blocks_bytes(std::int64_t start, std::int64_t num_tokens) const;
    /// Like `export_sequence` and `import_sequence`, for whole blocks. Only caches with the same block size and
    /// instruction set can exchange them. The state of a sequence is not among them: `import_sequence` sets it.
    void export_blocks(std::int64_t sequence_id, std::int64_t start, std::int64_t num_tokens, std::uint8_t* out) const;
    void import_blocks(std::int64_t sequence_id, std::int64_t start, std::int64_t num_tokens,
                       std::span<const std::uint8_t> data);
    /// Like `import_blocks`, but for blocks that are written later; until then they hold old data.
    void place_blocks(std::int64_t sequence_id, std::int64_t start, std::int64_t num_tokens);
    /// Where these whole blocks lie, in the order of `export_blocks`.
    std::vector<std::span<std::uint8_t>> block_runs(std::int64_t sequence_id, std::int64_t start,
                                                    std::int64_t num_tokens) const;
    /// Commits the memory of a block in one layer, used or not, and keeps its content. Any thread may call it while
    /// others use the cache.
    bool commit_block(std::int64_t layer, std::int64_t block) const {
        return arena_.commit(layouts_[layer].region_offset_bytes + block * layouts_[layer].block_bytes, layouts_[layer].block_bytes);
    }
    /// Number of sequences to which the open step adds rows.
    std::int64_t num_grown() const { return std::int64_t(grown_.size()); }

  private:
    void check_import(std::int64_t sequence_id, std::int64_t start, std::int64_t num_tokens) const;
    Sequence& grown(std::int64_t sequence_id, std::int64_t length, bool cleared);
    void begin_from_state(std::int64_t sequence_id, std::int64_t base, std::span<const std::uint8_t> data);
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
    std::span<std::uint8_t> layer_bytes(std::int64_t layer, std::int32_t block) const;
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
    std::vector<std::int64_t> begun_;  // sequences that begin from a state, until a step ends
    BlockChecksums checksums_;

    mutable std::mutex incoming_mutex_;              // guards the next line and incoming blocks
    std::unordered_map<std::int64_t, Incoming> incoming_;  // by job id
    std::atomic<int> controls_waiting_ = 0;          // wait for the mutex; a store lets them have it first

    /// An edit of a block's data: first copy another block (unless `source` is the block itself), then turn a tile's
    /// keys into rows.
    struct BlockEdit {
        std::int32_t from, to;
        std::int64_t tile;  // -1: none
    };

    // State of the open step. Blocks are edited only once the whole step is known to be valid. Until then a block that
    // a control freed still holds its data, and an undo only restores tables.
    std::vector<std::pair<std::int64_t, std::optional<Sequence>>> before_;  // sequences that the controls changed
    std::vector<BlockEdit> edits_;                                          // in their order
    std::vector<std::int64_t> grown_;                                       // sequence ids of the spans
    std::unordered_map<std::int64_t, Incoming> opened_;                     // jobs that the controls opened
    std::vector<std::int64_t> closed_;                                      // jobs that controls committed or released
    std::size_t log_size_after_controls_ = 0;
};

}  // namespace rworker
