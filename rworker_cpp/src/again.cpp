// Attention of one row a second time, for audits: the same work in the same order as in the row's step, but nothing is
// stored.
#include <string>

#include "rworker/attention_job.hpp"
#include "rworker/values_of_keys.hpp"
#include "rworker/worker.hpp"

namespace rworker {

void Worker::check_again(const char* what, std::int64_t sequence_id, std::int64_t layer) const {
    const std::string name = what;
    if (in_step_) check_all_done(name);
    require(layer >= 0 && layer < std::int64_t(cache_.layers().size()),
            name + ": layer is " + std::to_string(layer) + "; there are " + std::to_string(cache_.layers().size()));
    const LayerSpec& spec = cache_.layers()[layer];
    require(!spec.state() && !spec.index() && spec.picked_by < 0,
            name + ": layer " + std::to_string(layer) + " is recurrent, an index, or reads what an index picks");
    cache_.whole_sequence(sequence_id);
}

Span Worker::span_again(const Again& asked) const {
    check_again("attend_again", asked.sequence_id, asked.layer);
    Span span{asked.sequence_id, asked.position, 1, asked.mode};
    if (asked.mode == SpanMode::read) {
        cache_.check_read(span);
        return span;
    }
    require(asked.mode == SpanMode::attend || asked.mode == SpanMode::partial,
            "attend_again: mode must be 1 (attend), 2 (partial) or 3 (read)");
    const std::int64_t stored = cache_.sequence(asked.sequence_id).pending_length;
    require(asked.position >= 0 && asked.position < stored,
            "attend_again: position is " + std::to_string(asked.position) + ", and sequence " +
                std::to_string(asked.sequence_id) + " has " + std::to_string(stored) + " tokens");
    span.mode = asked.mode == SpanMode::attend ? SpanMode::again : SpanMode::again_partial;
    return span;
}

RowCount Worker::rows_again(const Again& asked) const {
    const Span span = span_again(asked);
    if (span.mode == SpanMode::again) return {1, 0, 1, 0};
    const std::int64_t stored = cache_.sequence(asked.sequence_id).pending_length;
    return {1, 0, 0, span.mode == SpanMode::read ? 1 : num_nodes_of(stored)};
}

void Worker::attend_again(const Again& asked, const void* query, void* out, float* partials) {
    const Span span = span_again(asked);
    const LayerSpec& spec = cache_.layers()[asked.layer];
    const RowCount rows = rows_again(asked);
    const WorkList list(cache_, spec, {&span, 1});
    const std::int64_t floats = token_floats(spec), shared = list.num_partials * spec.num_kv_heads * floats;
    if (std::int64_t(shared_partials_.size()) < shared) shared_partials_.resize(shared);
    for (std::vector<float>& own : own_partials_)
        if (std::int64_t(own.size()) < list.num_own_partials * floats) own.resize(list.num_own_partials * floats);
    Payload payload{query, nullptr, nullptr, out, partials};
    Absorption absorption(kernels_, model_dtype_, pool_.num_threads());
    if (weights_[asked.layer]) {
        check_weights();
        absorption.reserve(cache_.layers(), 1, rows.out, rows.partials);
        payload = absorption.prepare(spec, *weights_[asked.layer], asked.layer, payload);
        pool_.run_here(absorption.before);
    }
    AttentionJob job(*this);
    job.prepare(list, asked.layer, payload);
    pool_.run_here(job);
    if (weights_[asked.layer]) pool_.run_here(absorption.after);
}

std::int64_t Worker::layer_bytes(std::int64_t sequence_id, std::int64_t layer, bool as_blocks) const {
    check_again("export_layer", sequence_id, layer);
    const std::int64_t token_bytes = cache_.token_bytes(layer);
    require(!as_blocks || cache_.layout(layer).block_bytes == cache_.block_size() * token_bytes,
            "export_layer: blocks of layer " + std::to_string(layer) + " are larger than their tokens");
    return cache_.sequence(sequence_id).pending_length * token_bytes;
}

void Worker::export_layer(std::int64_t sequence_id, std::int64_t layer, bool as_blocks, std::uint8_t* out) const {
    check_again("export_layer", sequence_id, layer);
    cache_.export_layer(sequence_id, layer, as_blocks, out);
}

}  // namespace rworker
