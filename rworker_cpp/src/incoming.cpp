#include "rworker/incoming.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include "rworker/kv_cache.hpp"

namespace rworker {
namespace {

constexpr std::int64_t kSliceBytes = 1 << 18;  // stored or read in about 0.1 ms; controls may have to wait that long

/// A bit for each of tokens [begin, end) of a tile that starts with token `first`.
std::uint16_t token_bits(std::int64_t first, std::int64_t begin, std::int64_t end) {
    const std::int64_t from = std::max<std::int64_t>(begin - first, 0);
    const std::int64_t to = std::min<std::int64_t>(end - first, kTileTokens);
    return std::uint16_t((1u << to) - (1u << from));
}

const std::uint8_t* byte_at(const void* data, std::int64_t bytes) {
    return static_cast<const std::uint8_t*>(data) + bytes;
}

/// Bytes of one row of all KV heads.
struct RowBytes {
    std::int64_t keys, values;
    RowBytes(const LayerSpec& layer, DType dtype)
        : keys(layer.num_kv_heads * layer.key_dim * item_bytes(dtype)),
          values(layer.num_kv_heads * layer.stored_value_dim() * item_bytes(dtype)) {}
};

/// Returns tokens [start, end) of `rows`.
IncomingRows part_of(const IncomingRows& rows, const RowBytes& bytes, std::int64_t start, std::int64_t end) {
    const std::int64_t before = start - rows.start;
    return {byte_at(rows.keys, before * bytes.keys), byte_at(rows.values, before * bytes.values), start, end - start,
            rows.dtype};
}

std::string token_range(std::int64_t begin, std::int64_t end) {
    return "[" + std::to_string(begin) + ", " + std::to_string(end) + ")";
}

std::string job_name(std::int64_t job_id) { return "job " + std::to_string(job_id); }

}  // namespace

Incoming::Incoming(std::vector<std::int32_t> blocks, std::vector<std::int32_t> state_blocks, std::int64_t begin,
                   std::int64_t end, std::int64_t num_layers)
    : blocks_(std::move(blocks)),
      state_blocks_(std::move(state_blocks)),
      begin_(begin),
      end_(end),
      num_layers_(num_layers),
      num_missing_(num_layers * (end - begin)),
      arrived_(num_layers * num_tiles()) {}

std::int64_t Incoming::num_tiles() const { return (end_ - 1) / kTileTokens - begin_ / kTileTokens + 1; }

std::uint16_t& Incoming::arrived(std::int64_t layer, std::int64_t tile) {
    return arrived_[key_of(layer, tile - begin_ / kTileTokens)];
}

void Incoming::check(std::int64_t layer, std::int64_t start, std::int64_t num_rows) const {
    if (layer < 0 || layer >= num_layers_)
        throw Error("store: layer is " + std::to_string(layer) + "; there are " + std::to_string(num_layers_));
    if (start < begin_ || start >= end_ || num_rows < 1 || num_rows > end_ - start)
        throw Error("store: " + std::to_string(num_rows) + " rows from " + std::to_string(start) +
                    " on; those of tokens " + token_range(begin_, end_) + " are incoming");
    const std::int64_t end = start + num_rows, skipped = begin_ / kTileTokens;
    for (std::int64_t tile = start / kTileTokens; tile * kTileTokens < end; ++tile)
        if (arrived_[key_of(layer, tile - skipped)] & token_bits(tile * kTileTokens, start, end))
            throw Error("store: some of the rows " + token_range(start, end) + " of layer " + std::to_string(layer) +
                        " came before");
}

void Incoming::check_read(std::int64_t layer, std::int64_t start, std::int64_t num_rows) const {
    if (layer < 0 || layer >= num_layers_)
        throw Error("read: layer is " + std::to_string(layer) + "; there are " + std::to_string(num_layers_));
    if (start < 0 || start >= begin_ || num_rows < 1 || num_rows > begin_ - start)
        throw Error("read: " + std::to_string(num_rows) + " rows from " + std::to_string(start) +
                    " on; those of tokens " + token_range(0, begin_) + " were there before");
}

std::int64_t Incoming::length_seen(std::int64_t layer) const {
    if (begin_ == end_) return end_;
    const std::int64_t tile = begin_ / kTileTokens;
    const auto [first, last] = tokens_of(tile);
    const std::uint16_t all = token_bits(tile * kTileTokens, first, last);
    return (arrived_[key_of(layer, 0)] & all) == all ? end_ : begin_;
}

std::pair<std::int64_t, std::int64_t> Incoming::tokens_of(std::int64_t tile) const {
    return {std::max(tile * kTileTokens, begin_), std::min((tile + 1) * kTileTokens, end_)};
}

void Incoming::count(std::int64_t layer, std::int64_t start, std::int64_t end) {
    for (std::int64_t tile = start / kTileTokens; tile * kTileTokens < end; ++tile)
        arrived(layer, tile) |= token_bits(tile * kTileTokens, start, end);
    num_missing_ -= end - start;
}

Incoming::Staged& Incoming::staged(std::int64_t layer, std::int64_t tile) { return staged_[key_of(layer, tile)]; }

void Incoming::drop_staged(std::int64_t layer, std::int64_t tile) { staged_.erase(key_of(layer, tile)); }

std::unique_lock<std::mutex> KVCache::lock_incoming(std::span<const Control> controls) {
    const bool touches = std::any_of(controls.begin(), controls.end(), [&](const Control& control) {
        if (control.verb != Verb::release) return control.verb == Verb::reserve || control.verb == Verb::commit;
        const auto found = sequences_.find(control.sequence_id);
        return found != sequences_.end() && found->second.job_id;
    });
    std::unique_lock<std::mutex> lock(incoming_mutex_, std::defer_lock);
    if (!touches) return lock;
    controls_waiting_.fetch_add(1);
    lock.lock();
    controls_waiting_.fetch_sub(1);
    return lock;
}

void KVCache::reserve(const Control& control) {
    const std::string name = "reserve: sequence " + std::to_string(control.sequence_id);
    const auto found = sequences_.find(control.sequence_id);
    const std::int64_t length = found == sequences_.end() ? 0 : found->second.length;
    if (found != sequences_.end() && found->second.job_id) throw Error(name + " is incoming already");
    if (states_.num_blocks() && length > 0)
        throw Error(name + " has a state, and prefill workers send that of a prompt from its first token on alone");
    if (control.num_tokens < std::max<std::int64_t>(length, 1))
        throw Error(name + ": num_tokens is " + std::to_string(control.num_tokens) + ", but it holds " +
                    std::to_string(length) + " tokens");
    if (control.num_tokens > pool_.num_blocks() * block_size_)
        throw Error(name + ": out of blocks: a bug in the scheduler: num_tokens is " +
                    std::to_string(control.num_tokens) + ", more than the whole cache holds");
    if (incoming_.contains(control.source_id) || opened_.contains(control.source_id))
        throw Error(name + ": " + job_name(control.source_id) + " exists already; each has an id of its own");
    remember(control.sequence_id);
    Sequence& sequence = sequences_[control.sequence_id];
    sequence.job_id = control.source_id;
    while (std::int64_t(sequence.blocks.size()) < blocks_for(control.num_tokens))
        sequence.blocks.push_back(pool_.take());
    take_state(sequence);
    opened_.emplace(control.source_id, Incoming(sequence.blocks, sequence.state_blocks, length, control.num_tokens,
                                                std::int64_t(layers_.size())));
}

void KVCache::commit(const Control& control) {
    const std::string name = "commit: sequence " + std::to_string(control.sequence_id);
    if (sequence(control.sequence_id).job_id != control.source_id)
        throw Error(name + " is not incoming under " + job_name(control.source_id));
    const auto opened = opened_.find(control.source_id);
    const Incoming& job = opened == opened_.end() ? incoming_.at(control.source_id) : opened->second;
    if (control.num_tokens != job.end())
        throw Error(name + ": num_tokens is " + std::to_string(control.num_tokens) + ", but it was reserved for " +
                    std::to_string(job.end()));
    if (job.num_missing() > 0)
        throw Error(name + ": " + std::to_string(job.num_missing()) + " of its layers' rows did not come yet");
    remember(control.sequence_id);
    Sequence& committed = sequences_.at(control.sequence_id);
    committed.length = committed.pending_length = control.num_tokens;
    committed.job_id.reset();
    note_full(control.sequence_id, 0);
    closed_.push_back(control.source_id);
}

const Incoming& KVCache::incoming(std::int64_t job_id) const {
    const auto found = incoming_.find(job_id);
    if (found == incoming_.end())
        throw UnknownSequence(job_name(job_id) + " is unknown; it was never reserved, or is over");
    return found->second;
}

std::int64_t KVCache::num_incoming() const {
    const std::lock_guard<std::mutex> lock(incoming_mutex_);
    return std::int64_t(incoming_.size());
}

void KVCache::check_store(std::int64_t job_id, std::int64_t layer, std::int64_t start, std::int64_t num_rows) const {
    const std::lock_guard<std::mutex> lock(incoming_mutex_);
    incoming(job_id).check(layer, start, num_rows);
}

void KVCache::check_read(std::int64_t job_id, std::int64_t layer, std::int64_t start, std::int64_t num_rows) const {
    const std::lock_guard<std::mutex> lock(incoming_mutex_);
    incoming(job_id).check_read(layer, start, num_rows);
}

/// Number of rows of a slice, which is stored or read at once. Controls wait for one slice at most.
std::int64_t KVCache::slice_rows(std::int64_t layer, DType dtype) const {
    const RowBytes bytes(layers_[layer], dtype);
    return std::max<std::int64_t>(kSliceBytes / (bytes.keys + bytes.values), kTileTokens);
}

std::lock_guard<std::mutex> KVCache::let_controls_go_first() const {
    while (controls_waiting_.load() > 0) std::this_thread::yield();
    return std::lock_guard<std::mutex>(incoming_mutex_);
}

void KVCache::read_prefix(std::int64_t job_id, std::int64_t layer, const OutgoingRows& rows) const {
    check_read(job_id, layer, rows.start, rows.num_rows);
    const std::int64_t most = std::max<std::int64_t>(kSliceBytes / token_bytes(layer), kTileTokens);
    for (std::int64_t start = rows.start; start < rows.end(); start += most) {
        const std::lock_guard<std::mutex> lock = let_controls_go_first();
        read_slice(incoming(job_id), layer, rows, start, std::min(start + most, rows.end()));
    }
}

void KVCache::store_state(std::int64_t job_id, std::int64_t layer, std::span<const std::uint8_t> data) {
    const std::lock_guard<std::mutex> lock = let_controls_go_first();
    const std::int64_t begin = incoming(job_id).begin(), end = incoming(job_id).end();
    incoming(job_id).check(layer, begin, end - begin);
    const std::int64_t row_bytes = 4 * states_.row_floats(), rows = layers_[layer].state() ? states_.rows_of_layer(layer) : 0;
    if (rows == 0 || std::int64_t(data.size()) != rows * row_bytes)
        throw Error("store: the state of layer " + std::to_string(layer) + " has " + std::to_string(rows * row_bytes) +
                    " bytes, not " + std::to_string(data.size()));
    Incoming& job = incoming_.at(job_id);
    for (std::int64_t i = 0; i < rows; ++i)
        std::memcpy(state_row(job.state_blocks().data(), states_.first_row(layer) + i), data.data() + i * row_bytes, row_bytes);
    job.count(layer, begin, end);
}

void KVCache::store(std::int64_t job_id, std::int64_t layer, const IncomingRows& rows, const AppendKernel* append) {
    check_store(job_id, layer, rows.start, rows.num_rows);
    if (layers_[layer].state()) throw Error("store: layer " + std::to_string(layer) + " has a state, and no rows");
    const RowBytes bytes(layers_[layer], rows.dtype);
    const std::int64_t most = slice_rows(layer, rows.dtype);
    for (std::int64_t start = rows.start; start < rows.end();) {
        const std::int64_t end = std::min((start + most) / kTileTokens * kTileTokens, rows.end());
        const std::lock_guard<std::mutex> lock = let_controls_go_first();
        incoming(job_id).check(layer, start, end - start);  // the job may have ended meanwhile
        store_slice(incoming_.at(job_id), layer, part_of(rows, bytes, start, end), append);
        start = end;
    }
}

/// Stores neighbouring whole tiles in one call, and incomplete tiles at both ends one by one.
void KVCache::store_slice(Incoming& job, std::int64_t layer, const IncomingRows& rows, const AppendKernel* append) const {
    const RowBytes bytes(layers_[layer], rows.dtype);
    std::int64_t run = rows.start;  // the first of the rows that are not written yet
    const auto write_until = [&](std::int64_t end) {
        if (run >= end) return;
        write_rows(job, layer, part_of(rows, bytes, run, end), append);
        job.count(layer, run, end);
    };
    for (std::int64_t start = rows.start; start < rows.end();) {
        const auto [first, last] = job.tokens_of(start / kTileTokens);
        const std::int64_t end = std::min(last, rows.end());
        if (start != first || end != last) {
            write_until(start);
            stage(job, layer, part_of(rows, bytes, start, end), append);
            run = end;
        }
        start = end;
    }
    write_until(rows.end());
}

/// Keeps a part of a tile aside, or writes the tile once it is complete.
void KVCache::stage(Incoming& job, std::int64_t layer, const IncomingRows& rows, const AppendKernel* append) const {
    const RowBytes bytes(layers_[layer], rows.dtype);
    const std::int64_t tile = rows.start / kTileTokens, row = rows.start % kTileTokens;
    const auto [first, last] = job.tokens_of(tile);
    Incoming::Staged& staged = job.staged(layer, tile);
    staged.keys.resize(kTileTokens * bytes.keys);
    staged.values.resize(kTileTokens * bytes.values);
    std::memcpy(staged.keys.data() + row * bytes.keys, rows.keys, rows.num_rows * bytes.keys);
    if (bytes.values > 0)
        std::memcpy(staged.values.data() + row * bytes.values, rows.values, rows.num_rows * bytes.values);
    staged.num_rows += rows.num_rows;
    job.count(layer, rows.start, rows.end());
    if (staged.num_rows < last - first) return;
    const IncomingRows whole{staged.keys.data(), staged.values.data(), tile * kTileTokens, kTileTokens, rows.dtype};
    write_rows(job, layer, part_of(whole, bytes, first, last), append);
    job.drop_staged(layer, tile);
}

void KVCache::write_rows(const Incoming& job, std::int64_t layer, const IncomingRows& rows,
                         const AppendKernel* append) const {
    const LayerSpec& spec = layers_[layer];
    for (std::int64_t head = 0; head < spec.num_kv_heads; ++head)
        append[append_index(spec, dtype_)]({
            .view = view(layer, head, job.blocks().data()),
            .dtype = rows.dtype,
            .keys = byte_at(rows.keys, head * spec.key_dim * item_bytes(rows.dtype)),
            .values = byte_at(rows.values, head * spec.stored_value_dim() * item_bytes(rows.dtype)),
            .key_stride = spec.num_kv_heads * spec.key_dim,
            .value_stride = spec.num_kv_heads * spec.stored_value_dim(),
            .begin = rows.start,
            .end = rows.end(),
            .key_dim = int(spec.key_dim),
            .value_dim = int(spec.stored_value_dim()),
            .latent_dim = spec.values_in_keys() ? int(spec.value_dim) : 0,
            .keep_rows = spec.keeps_rows(),
        });
}

}  // namespace rworker
