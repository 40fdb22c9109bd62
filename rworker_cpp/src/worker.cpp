#include "rworker/worker.hpp"

#include <algorithm>
#include <string>

#include "rworker/attention_job.hpp"
#include "rworker/kernel_choice.hpp"
#include "rworker/state_job.hpp"
#include "rworker/values_of_keys.hpp"

namespace rworker {
namespace {

std::vector<Span> all_spans(std::span<const std::vector<Span>> mini_batches) {
    std::vector<Span> spans;
    for (const std::vector<Span>& mini_batch : mini_batches)
        spans.insert(spans.end(), mini_batch.begin(), mini_batch.end());
    return spans;
}

}  // namespace

Worker::Worker(WorkerConfig config)
    : cache_((config = checked(std::move(config))).layers, config.kv_dtype, config.block_size, config.num_blocks),
      kernels_(choose_kernels(config.isa)),
      read_ahead_(config.read_ahead),
      model_dtype_(config.model_dtype),
      own_partials_(config.num_threads),
      scratch_(config.num_threads),
      split_values_(config.num_threads),
      edits_(cache_),
      pool_(config.num_threads, config.cores),
      ahead_(cache_, pool_, config.cores) {
    std::int64_t scratch = 0;
    for (std::size_t i = 0; i < config.layers.size(); ++i) {
        const LayerSpec& layer = config.layers[i];
        if (layer.state()) {
            shape_of_layer_.push_back(-1);
            continue;
        }
        const auto same = std::find_if(shapes_.begin(), shapes_.end(),
                                       [&](std::int64_t other) { return layer.same_work(config.layers[other]); });
        shape_of_layer_.push_back(same - shapes_.begin());
        if (same == shapes_.end()) shapes_.push_back(std::int64_t(i));
        scratch = std::max(scratch, scratch_floats(layer.key_dim, layer.value_dim));
    }
    for (std::vector<float>& floats : scratch_) floats.resize(scratch);
    picked_rows_.assign(config.num_threads, PickedRows(cache_));
    for (const LayerSpec& layer : config.layers)
        weights_.push_back(layer.absorbs() ? std::make_unique<HeadWeights>(layer, model_dtype_) : nullptr);
    for (std::vector<std::uint8_t>& bytes : split_values_) bytes.resize(most_split_bytes(cache_, model_dtype_));
}

Worker::~Worker() = default;

void Worker::set_weights(std::int64_t layer, std::int64_t first_head, std::int64_t num_heads, const void* rows) {
    require(!in_step_, "set_weights: a step is open; end_step or abandon_step comes first");
    require(layer >= 0 && layer < std::int64_t(weights_.size()) && weights_[layer],
            "set_weights: layer " + std::to_string(layer) + " multiplies no K and V here");
    weights_[layer]->set(first_head, num_heads, rows);
}

void Worker::check_weights() const {
    for (std::size_t layer = 0; layer < weights_.size(); ++layer)
        require(!weights_[layer] || weights_[layer]->is_complete(),
                "begin_step: K and V of layer " + std::to_string(layer) + " did not come yet; set_weights comes first");
}

void Worker::begin_step(std::span<const Control> controls, std::span<const std::vector<Span>> mini_batches) {
    require(!in_step_, "begin_step: the last step is still open; end_step or abandon_step comes first");
    const bool only_controls = std::ranges::all_of(mini_batches, [](const auto& spans) { return spans.empty(); });
    if (!only_controls) check_weights();
    check_order(mini_batches);
    ahead_.end_step(now_seconds());  // starts the quiet time, so no piece begins while the step is planned
    cache_.begin_step(controls, all_spans(mini_batches));
    aim_ahead();
    edits_.plan();
    edits_.brief() ? edits_.run_all() : pool_.submit(edits_);
    try {
        plan(mini_batches);
    } catch (...) {
        edits_.wait();
        cache_.abandon_step();
        throw;
    }
    in_step_ = true;
    ahead_.begin_step(now_seconds());
}

void Worker::commit_ahead(std::int64_t least) {
    require(least >= 0, "commit_ahead: least is " + std::to_string(least) + "; it must be at least 0");
    least_ahead_ = least;
    aim_ahead();
}

/// Free blocks that were used before have memory, and they are taken first.
void Worker::aim_ahead() {
    constexpr std::int64_t kShare = 2;
    if (least_ahead_ < 0) return;
    const BlockPool& pool = cache_.pool();
    const std::int64_t ahead = std::max({least_ahead_, cache_.num_grown(), pool.num_touched() / kShare});
    const std::int64_t end = std::min(pool.num_blocks() - pool.num_free() + ahead, pool.num_blocks());
    ahead_.aim(end);
    if (end > pool.num_touched()) ahead_.start();
}

const Worker::MiniBatch& Worker::mini_batch_at(std::int64_t index) const {
    require(in_step_, "no step is open; begin_step comes first");
    require(index >= 0 && index < std::int64_t(mini_batches_.size()),
            "mini_batch is " + std::to_string(index) + "; this step has " + std::to_string(mini_batches_.size()));
    return mini_batches_[index];
}

RowCount Worker::row_count(std::int64_t mini_batch, std::int64_t layer) const {
    mini_batch_at(mini_batch);
    require(layer >= 0 && layer < std::int64_t(cache_.layers().size()),
            "layer is " + std::to_string(layer) + "; there are " + std::to_string(cache_.layers().size()));
    return mini_batches_[mini_batch].rows.of(cache_.layers()[layer]);
}

void Worker::check_submit(std::int64_t mini_batch, std::int64_t layer) const {
    row_count(mini_batch, layer);
    const std::string name = "mini-batch " + std::to_string(mini_batch);
    require(!mini_batches_[mini_batch].outstanding, name + " has a layer outstanding; wait for it first");
    require(!mini_batches_[mini_batch].submitted[layer],
            name + ": layer " + std::to_string(layer) + " was submitted before in this step");
    const std::int64_t index = cache_.layers()[layer].picked_by;
    require(index < 0 || index == jobs_[mini_batch]->picked_by(),
            name + ": layer " + std::to_string(layer) + " reads what layer " + std::to_string(index) +
                " picks, which was not submitted just before");
    require(index < 0 || mini_batches_[mini_batch].rows.partials == 0 || jobs_[mini_batch]->is_shared(),
            name + ": layer " + std::to_string(layer) + " reads what layer " + std::to_string(index) +
                " picks, and how much of it lies in these ranges was not told; share comes first");
}

void Worker::share(std::int64_t mini_batch, std::int64_t layer, std::span<const std::int32_t> counts) {
    const std::int64_t rows = row_count(mini_batch, layer).partials;
    const LayerSpec& index = cache_.layers()[layer];
    AttentionJob& job = *jobs_[mini_batch];
    require(index.index() && job.picked_by() == layer && job.layer() == layer &&
                !mini_batches_[mini_batch].outstanding,
            "share: layer " + std::to_string(layer) + " did not pick last in mini-batch " + std::to_string(mini_batch));
    const std::int64_t wanted = rows * index.pick_heads();
    require(std::int64_t(counts.size()) == wanted,
            "share: there are " + std::to_string(counts.size()) + " counts, not " + std::to_string(wanted));
    job.share(counts);
}

void Worker::prepare(std::int64_t mini_batch, std::int64_t layer, Payload payload) {
    MiniBatch& target = mini_batches_[mini_batch];
    if (shape_of_layer_[layer] < 0) {
        target.jobs = {state_jobs_[mini_batch].get()};
        state_jobs_[mini_batch]->prepare(layer, payload);
        return;
    }
    target.jobs = {jobs_[mini_batch].get()};
    if (weights_[layer]) {
        Absorption& absorption = *absorptions_[mini_batch];
        target.jobs = {&absorption.before, jobs_[mini_batch].get(), &absorption.after};
        payload = absorption.prepare(cache_.layers()[layer], *weights_[layer], layer, payload);
    }
    jobs_[mini_batch]->prepare(*target.lists[shape_of_layer_[layer]], layer, payload);
}

void Worker::submit(std::int64_t mini_batch, std::int64_t layer, const Payload& payload) {
    check_submit(mini_batch, layer);
    MiniBatch& target = mini_batches_[mini_batch];
    prepare(mini_batch, layer, payload);
    const auto is_brief = [](const LayerJob* job) { return job->brief(); };
    const bool here = std::all_of(target.jobs.begin(), target.jobs.end(), is_brief) && idle();
    if (row_count(mini_batch, layer).any())
        for (LayerJob* job : target.jobs) here ? pool_.run_here(*job) : pool_.submit(*job);
    target.outstanding = true;
    target.submitted[layer] = 1;
}

void Worker::run(std::int64_t mini_batch, std::int64_t layer, const Payload& payload) {
    check_submit(mini_batch, layer);
    for (const MiniBatch& each : mini_batches_) require(!each.outstanding, "run: a layer is outstanding; wait for it");
    MiniBatch& target = mini_batches_[mini_batch];
    prepare(mini_batch, layer, payload);
    edits_.wait();
    if (row_count(mini_batch, layer).any())
        for (LayerJob* job : target.jobs) pool_.run_here(*job);
    target.submitted[layer] = 1;
    finish(mini_batch);
}

bool Worker::idle() const {
    for (std::size_t i = 0; i < mini_batches_.size(); ++i)
        if (mini_batches_[i].outstanding && !mini_batches_[i].jobs.back()->finished()) return false;
    return edits_.finished();
}

bool Worker::ready(std::int64_t mini_batch) const {
    require(mini_batch_at(mini_batch).outstanding,
            "mini-batch " + std::to_string(mini_batch) + " has nothing submitted");
    return mini_batches_[mini_batch].jobs.back()->finished();
}

void Worker::wait(std::int64_t mini_batch) {
    require(mini_batch_at(mini_batch).outstanding,
            "mini-batch " + std::to_string(mini_batch) + " has nothing submitted");
    mini_batches_[mini_batch].jobs.back()->wait();
    finish(mini_batch);
}

void Worker::finish(std::int64_t mini_batch) {
    MiniBatch& done = mini_batches_[mini_batch];
    done.outstanding = false;
    const std::int64_t layer = done.jobs.front()->layer();
    if (!row_count(mini_batch, layer).any()) return;
    const std::size_t cell = mini_batch * cache_.layers().size() + layer;
    report_.busy_start[cell] = done.jobs.front()->start_seconds;
    report_.busy_end[cell] = done.jobs.back()->end_seconds;
    for (const LayerJob* job : done.jobs) {
        report_.bytes_read += job->bytes_read();
        bytes_read_ += job->bytes_read();
    }
}

void Worker::check_all_done(const std::string& what) const {
    for (std::size_t i = 0; i < mini_batches_.size(); ++i) {
        const std::string name = what + ": mini-batch " + std::to_string(i);
        require(!mini_batches_[i].outstanding, name + " has a layer outstanding; wait for it first");
        for (std::size_t layer = 0; layer < cache_.layers().size(); ++layer)
            require(mini_batches_[i].submitted[layer] || !mini_batches_[i].rows.of(cache_.layers()[layer]).any(),
                    name + ": layer " + std::to_string(layer) +
                        " was never submitted; submit every layer or abandon_step");
    }
}

StepReport Worker::end_step() {
    require(in_step_, "end_step: no step is open; begin_step comes first");
    check_all_done("end_step");
    edits_.wait();
    cache_.commit_step();
    in_step_ = false;
    ahead_.end_step(now_seconds());
    report_.blocks_free = cache_.pool().num_free();
    return std::move(report_);
}

void Worker::abandon_step() {
    require(in_step_, "abandon_step: no step is open; begin_step comes first");
    for (std::size_t i = 0; i < mini_batches_.size(); ++i)
        if (mini_batches_[i].outstanding) mini_batches_[i].jobs.back()->wait();
    edits_.wait();
    bool written = false;
    for (const MiniBatch& mini_batch : mini_batches_) {
        unwrite(mini_batch);
        written |= !mini_batch.jobs.empty();
    }
    if (written && cache_.states().num_blocks()) settle_others();
    cache_.abandon_step(written);
    cache_.drop_unbegun();
    aim_ahead();
    in_step_ = false;
    ahead_.end_step(now_seconds());
}

/// Some layers have advanced states by rows that they lacked, so the others must too.
void Worker::settle_others() {
    for (std::size_t i = 0; i < mini_batches_.size(); ++i)
        for (std::size_t layer = 0; layer < cache_.layers().size(); ++layer)
            if (cache_.layers()[layer].state() && !mini_batches_[i].submitted[layer]) state_jobs_[i]->settle(std::int64_t(layer));
}

void Worker::unwrite(const MiniBatch& mini_batch) const {
    for (std::size_t layer = 0; layer < mini_batch.submitted.size(); ++layer) {
        if (!mini_batch.submitted[layer] || shape_of_layer_[layer] < 0) continue;
        for (const PlannedSpan& span : mini_batch.lists[shape_of_layer_[layer]]->stored())
            if (span.mode != SpanMode::read) cache_.unwrite(std::int64_t(layer), span.blocks, span.context_len, span.end);
    }
}

void Worker::store(std::int64_t job_id, std::int64_t layer, const IncomingRows& rows) {
    cache_.store(job_id, layer, rows, kernels_.append);
}

Statistics Worker::statistics() const {
    const BlockPool& pool = cache_.pool();
    std::int64_t tokens = 0;
    const std::vector<std::int64_t> ids = cache_.sequence_ids();
    for (const std::int64_t id : ids) tokens += cache_.sequence(id).length;
    return {pool.num_blocks() - pool.num_free(),
            pool.num_free(),
            pool.num_shared(),
            std::int64_t(ids.size()),
            cache_.num_incoming(),
            tokens,
            bytes_read_,
            std::max(pool.num_touched(), ahead_.end()) * cache_.block_bytes()};
}

}  // namespace rworker
