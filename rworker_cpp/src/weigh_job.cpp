#include "rworker/weigh_job.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "rworker/absorption.hpp"
#include "rworker/values_of_keys.hpp"
#include "rworker/worker.hpp"

namespace rworker {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr double kUnit = 1.0 / double(std::int64_t(1) << 44);

std::uint8_t* aligned(std::vector<std::uint8_t>& bytes) {
    return bytes.data() + (64 - reinterpret_cast<std::uintptr_t>(bytes.data()) % 64) % 64;
}

}  // namespace

WeighJob::WeighJob(Worker& worker, const WeighQuery& query)
    : worker_(worker), query_(query), queries_(query.queries), absorbed_(query.layers.size()), picks_(query.layers.size()) {
    check();
    const Sequence& sequence = worker_.cache_.whole_sequence(query_.sequence_id);
    blocks_ = &sequence.blocks;
    stored_ = sequence.pending_length, seen_ = std::min(query_.position + 1, stored_);
    require(seen_ > 0, "weigh: sequence " + std::to_string(query_.sequence_id) + " has no tokens up to the query");
    for (const std::int64_t layer : query_.layers)
        require(!worker_.cache_.layers()[layer].index() || query_.position < stored_,
                "weigh: a query behind the sequence's last token picks none of its tokens");
    stride_ = (stored_ + kSplitTokens - 1) / kSplitTokens * kSplitTokens;
    first_block_ = query_.offset / query_.block;
    num_blocks_ = (query_.offset + seen_ - 1) / query_.block - first_block_ + 1;
    add_items();
    const bool has_picks = std::ranges::any_of(
        query_.layers, [&](std::int64_t layer) { return worker_.cache_.layers()[layer].keeps_rows(); });
    const std::size_t threads = std::size_t(worker_.pool_.num_threads());
    rows_.assign(threads, std::vector<float>(kHeadsTogether * stride_));
    picked_.assign(threads, std::vector<float>(has_picks ? kHeadsTogether * stride_ : 0));
    sums_.assign(threads, std::vector<double>(num_blocks_));
    totals_.assign(threads, std::vector<std::int64_t>(num_blocks_));
    absorb();
    for (std::size_t layer = 0; layer < query_.layers.size(); ++layer)
        if (spec_of(layer).index()) pick(layer);
}

const LayerSpec& WeighJob::spec_of(std::size_t layer) const { return worker_.cache_.layers()[query_.layers[layer]]; }

void WeighJob::check() const {
    constexpr std::int64_t most = std::int64_t(1) << 40;
    const std::int64_t num_layers = std::int64_t(worker_.cache_.layers().size());
    require(worker_.in_step_, "weigh: no step is open; begin_step comes first");
    worker_.check_all_done("weigh");
    require(query_.position >= 0 && query_.position < most && query_.offset >= 0 && query_.offset < most,
            "weigh: position and offset must be from 0 to 2^40");
    require(query_.block > 0 && query_.block < most, "weigh: a block must have at least 1 token");
    require(!query_.layers.empty() && query_.layers.size() == query_.queries.size(),
            "weigh: each layer must have its query, and one layer is the least");
    for (std::size_t i = 0; i < query_.layers.size(); ++i) {
        const std::int64_t layer = query_.layers[i];
        require(layer >= 0 && layer < num_layers && (i == 0 || layer > query_.layers[i - 1]),
                "weigh: layers must ascend, from 0 to " + std::to_string(num_layers - 1));
        require(!spec_of(i).state(), "weigh: layer " + std::to_string(layer) + " is recurrent, and attends to no token");
        const std::int64_t index = spec_of(i).picked_by;
        require(index < 0 || std::ranges::count(query_.layers, index) == 1,
                "weigh: layer " + std::to_string(layer) + " reads what layer " + std::to_string(index) +
                    " picks, whose query is missing");
        require(index < 0 || (query_.offset == 0 && !query_.norms),
                "weigh: a range cannot tell what layer " + std::to_string(layer) + " reads of it");
    }
}

void WeighJob::add_items() {
    for (std::size_t layer = 0; layer < query_.layers.size(); ++layer) {
        const LayerSpec& spec = spec_of(layer);
        if (spec.index()) continue;
        ++num_attending_;
        for (std::int64_t head = 0; head < spec.num_kv_heads; ++head)
            for (std::int64_t first = 0; first < spec.group(); first += kHeadsTogether) {
                const std::int64_t count = std::min(kHeadsTogether, spec.group() - first);
                items_.push_back({layer, head, first, count, num_heads_});
                num_heads_ += count;
            }
    }
    require(num_attending_ > 0, "weigh: none of the layers attends");
}

/// Queries as long as latents, in layers whose K is multiplied here.
void WeighJob::absorb() {
    HeadProductJob job(worker_.kernels_, worker_.pool_.num_threads());
    for (std::size_t layer = 0; layer < query_.layers.size(); ++layer) {
        const LayerSpec& spec = spec_of(layer);
        if (!spec.absorbs()) continue;
        absorbed_[layer].resize(spec.num_heads * spec.key_dim * item_bytes(worker_.model_dtype_));
        queries_[layer] = absorbed_[layer].data();
        job.prepare_queries(spec, *worker_.weights_[query_.layers[layer]], worker_.model_dtype_, query_.layers[layer],
                            query_.queries[layer], absorbed_[layer].data(), 1);
        worker_.pool_.run_here(job);
    }
}

/// Picks for the query as its step did: the same scores, in the same order.
void WeighJob::pick(std::size_t layer) {
    const LayerSpec& spec = spec_of(layer);
    const std::int64_t floats = score_floats(spec.num_heads, spec.index()->block);
    std::vector<float> scores(stride_ / kSplitTokens * floats);
    const TokenRow token{.position = query_.position, .payload_row = 0, .span = 0, .partials = 0, .first_seen = 0};
    for (std::int64_t split = 0; split * kSplitTokens < seen_; ++split)
        worker_.kernels_.score[int(dtype_of(spec, worker_.cache_.dtype()))]({
            .view = worker_.cache_.view(query_.layers[layer], 0, blocks_->data()),
            .dtype = worker_.model_dtype_,
            .queries = queries_[layer],
            .tokens = &token,
            .num_tokens = 1, .token_stride = spec.num_heads * spec.query_dim(),
            .group = int(spec.num_heads),
            .split = split, .end = std::min(stored_, (split + 1) * kSplitTokens),
            .scale = spec.scale,
            .soft_cap = 0.0f, .alibi_slopes = nullptr,
            .key_dim = int(spec.key_dim), .value_dim = int(spec.value_dim),
            .partials = scores.data(), .partial_stride = floats,
            .next = nullptr,
            .read_ahead = worker_.read_ahead_,
            .scratch = worker_.scratch_[0].data(),
            .pick_block = spec.index()->block,
        });
    picks_[layer].reset(query_.layers[layer], spec, 1, stored_);
    picks_[layer].pick(0, query_.position, scores.data(), floats);
}

void WeighJob::weigh(float* weights) {
    start();
    for (std::int64_t block = 0; block < num_blocks_; ++block) {
        std::int64_t total = 0;
        for (const std::vector<std::int64_t>& totals : totals_) total += totals[block];
        weights[block] = float(double(total) * kUnit);
    }
}

void WeighJob::find_norms(float* norms) {
    norms_ = norms;
    start();
}

void WeighJob::start() {
    std::int64_t bytes = 0;
    for (const Item& item : items_) bytes += seen_ * spec_of(item.layer).key_dim * item_bytes(worker_.model_dtype_);
    begin(query_.layers[0], std::int64_t(items_.size()), bytes, bytes);
    worker_.pool_.run_here(*this);
}

void WeighJob::run(std::int64_t index, std::int64_t, int thread) noexcept {
    const Item& item = items_[index];
    spec_of(item.layer).keeps_rows() ? score_picked(item, thread) : score(item, thread);
    for (std::int64_t head = 0; head < item.count; ++head) finish(item, head, thread);
}

std::int64_t WeighJob::first_seen(const LayerSpec& spec) const {
    return std::max<std::int64_t>(spec.first_seen(query_.offset + query_.position) - query_.offset, 0);
}

void WeighJob::score(const Item& item, int thread) {
    const LayerSpec& spec = spec_of(item.layer);
    const DType stored = dtype_of(spec, worker_.cache_.dtype());
    const std::int64_t first = first_seen(spec);
    const HeadView view = worker_.cache_.view(query_.layers[item.layer], item.kv_head, blocks_->data());
    std::uint8_t* const memory = aligned(worker_.split_values_[thread]);
    for (std::int64_t split = first / kSplitTokens; split * kSplitTokens < seen_; ++split) {
        const std::int64_t end = std::min(stored_, (split + 1) * kSplitTokens);
        const NextTokens tokens{view, split * kSplitTokens, end};
        const HeadView read = has_latent_codes(spec, stored)
                                  ? read_split(worker_.kernels_, spec, stored, worker_.model_dtype_, tokens, memory)
                                  : view;
        score_split(item, read, split, end, query_.position, first, rows_[thread].data(), thread);
    }
    if (spec.picked_by >= 0) hide_unpicked(item, thread);
}

/// Scores picked single tokens in the order of the picks; then moves each score to the position of its token.
void WeighJob::score_picked(const Item& item, int thread) {
    const LayerSpec& spec = spec_of(item.layer);
    const DType dtype = worker_.cache_.dtype();
    const std::size_t index = std::ranges::find(query_.layers, spec.picked_by) - query_.layers.begin();
    const std::int32_t* const picks = picks_[index].of(0, 0);
    const PickedTokens tokens(*spec_of(index).index(), query_.position, stored_);
    const HeadView view = worker_.cache_.view(query_.layers[item.layer], item.kv_head, blocks_->data());
    std::uint8_t* const memory = aligned(worker_.split_values_[thread]);
    for (std::int64_t split = 0; split * kSplitTokens < tokens.seen; ++split) {
        const std::int64_t begin = split * kSplitTokens, end = std::min(tokens.seen, begin + kSplitTokens);
        HeadView read = worker_.picked_rows_[thread].gather(view, spec, dtype, picks, begin, end);
        if (has_latent_codes(spec, dtype))
            read = read_split(worker_.kernels_, spec, dtype, worker_.model_dtype_, {read, begin, end}, memory);
        score_split(item, read, split, end, tokens.seen - 1, 0, picked_[thread].data(), thread);
    }
    for (std::int64_t head = 0; head < item.count; ++head) {
        float* const row = rows_[thread].data() + head * stride_;
        std::fill_n(row, seen_, kMinusInfinity);
        for (std::int64_t i = 0; i < tokens.seen; ++i) row[picks[i]] = picked_[thread][head * stride_ + i];
    }
}

void WeighJob::score_split(const Item& item, const HeadView& view, std::int64_t split, std::int64_t end,
                           std::int64_t position, std::int64_t first_seen, float* scores, int thread) {
    const LayerSpec& spec = spec_of(item.layer);
    const DType dtype = worker_.model_dtype_, stored = dtype_of(spec, worker_.cache_.dtype());
    const TokenRow token{.position = position, .payload_row = 0, .span = 0, .partials = 0, .first_seen = first_seen};
    const std::int64_t head = item.kv_head * spec.group() + item.first;
    worker_.kernels_.see[int(has_latent_codes(spec, stored) ? dtype : stored)]({
        .view = view,
        .dtype = dtype,
        .queries = static_cast<const std::uint8_t*>(queries_[item.layer]) + head * spec.query_dim() * item_bytes(dtype),
        .tokens = &token,
        .num_tokens = 1, .token_stride = spec.num_heads * spec.query_dim(),
        .group = int(item.count),
        .split = split, .end = end,
        .scale = spec.scale,
        .soft_cap = spec.soft_cap,
        .alibi_slopes = spec.alibi_slopes.empty() ? nullptr : spec.alibi_slopes.data() + head,
        .key_dim = int(spec.key_dim), .value_dim = 0,
        .partials = scores, .partial_stride = stride_,
        .next = nullptr,
        .read_ahead = worker_.read_ahead_,
        .scratch = worker_.scratch_[thread].data(),
    });
}

/// Sets the scores of tokens outside the picked blocks to -inf, since all tokens were scored in place.
void WeighJob::hide_unpicked(const Item& item, int thread) {
    const std::size_t index = std::ranges::find(query_.layers, spec_of(item.layer).picked_by) - query_.layers.begin();
    const Index& picker = *spec_of(index).index();
    const std::int32_t* const picks = picks_[index].of(0, picker.block > 0 ? item.kv_head : 0);
    const std::int64_t width = std::max<std::int64_t>(picker.block, 1);
    const std::int64_t count = std::min(picker.picks, query_.position / width + 1);
    std::int64_t next = 0;
    for (std::int64_t block = 0; block * width < seen_; ++block) {
        if (next < count && picks[next] == block && ++next) continue;
        for (std::int64_t head = 0; head < item.count; ++head)
            std::fill_n(rows_[thread].data() + head * stride_ + block * width, std::min(width, seen_ - block * width),
                        kMinusInfinity);
    }
}

/// Turns a row's scores into its part of the weights, or into its max and sum.
void WeighJob::finish(const Item& item, std::int64_t head, int thread) {
    const LayerSpec& spec = spec_of(item.layer);
    float* const row = rows_[thread].data() + head * stride_;
    const std::int64_t begin = first_seen(spec), end = seen_;
    if (norms_) norms_[2 * (item.row + head)] = kMinusInfinity, norms_[2 * (item.row + head) + 1] = 0.0f;
    if (begin >= end) return;
    const std::int64_t first = begin / 16 * 16, last = (end + 15) / 16 * 16;
    std::fill(row + first, row + begin, kMinusInfinity);
    std::fill(row + end, row + last, kMinusInfinity);
    const float* const norm = query_.norms ? query_.norms + 2 * (item.row + head) : nullptr;
    const float sink =
        norm || norms_ || spec.sinks.empty() ? kMinusInfinity : spec.sinks[item.kv_head * spec.group() + item.first + head];
    const float max = norm ? norm[0] : std::max(worker_.kernels_.largest(row + first, last - first), sink);
    if (max == kMinusInfinity) return;
    worker_.kernels_.exponentiate(row + first, last - first, max);
    const double sum = add_blocks(row, begin, end, thread);
    if (norms_) {
        norms_[2 * (item.row + head)] = max, norms_[2 * (item.row + head) + 1] = float(sum);
        return;
    }
    const double whole = norm ? double(norm[1]) : sum + std::exp(double(sink) - double(max));
    const double share = whole > 0 ? 1 / (whole * double(num_attending_ * spec.num_heads) * kUnit) : 0;
    const std::int64_t from = (query_.offset + begin) / query_.block - first_block_;
    for (std::int64_t block = from; block < num_blocks_; ++block) {
        const double units = sums_[thread][block] * share;
        if (units > 0 && units < 1e18) totals_[thread][block] += std::int64_t(units + 0.5);
    }
}

/// Adds up the weights of blocks, from token `begin` on; returns their sum.
double WeighJob::add_blocks(const float* weights, std::int64_t begin, std::int64_t end, int thread) {
    std::vector<double>& sums = sums_[thread];
    double total = 0;
    for (std::int64_t token = begin; token < end;) {
        const std::int64_t block = (query_.offset + token) / query_.block;
        const std::int64_t next = std::min((block + 1) * query_.block - query_.offset, end);
        double sum = 0;
        while (token < next) {
            float part = 0;
            for (const std::int64_t stop = std::min(token + 64, next); token < stop; ++token) part += weights[token];
            sum += part;
        }
        sums[block - first_block_] = sum;
        total += sum;
    }
    return total;
}

}  // namespace rworker
