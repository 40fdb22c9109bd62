#include <algorithm>
#include <bit>
#include <string>

#include "rworker/layer_checks.hpp"
#include "rworker/worker.hpp"

namespace rworker {
namespace {

/// Order of the modes in a mini-batch: read first, append last.
int order_of(SpanMode mode) {
    constexpr int kOrder[] = {3, 1, 2, 0};
    return kOrder[int(mode)];
}

/// Adds floats after filters and bias that kernels may read, and zeros as a missing bias.
std::shared_ptr<const StateSpec> padded(StateSpec state) {
    if (state.filters.empty()) state.filters.resize(state.channels(), 1.0f);
    state.filters.resize(state.filters.size() + 16);
    state.factors.resize(state.factors.size() + 16);
    state.bias.resize(state.channels() + 16);
    return std::make_shared<const StateSpec>(std::move(state));
}

}  // namespace

WorkerConfig checked(WorkerConfig config) {
    const bool attends = std::ranges::any_of(config.layers, [](const LayerSpec& layer) { return !layer.state(); });
    require(config.block_size >= kTileTokens && config.block_size <= (attends ? kMostBlockRows : kMostBlockTokens) &&
                std::has_single_bit(std::uint64_t(config.block_size)),
            "block_size is " + std::to_string(config.block_size) + "; it must be 16, 32, 64, 128 or 256" +
                (attends ? "" : ", or, where no layer attends, a higher power of two up to 2^30"));
    check_layers(config.layers, config.kv_dtype, config.block_size);
    for (LayerSpec& layer : config.layers)
        if (layer.state()) layer.kind = Recurrent{padded(*layer.state())};
    require(config.num_blocks >= 1 && config.num_blocks < INT32_MAX,
            "num_blocks is " + std::to_string(config.num_blocks) + "; it must be 1 to 2147483646");
    require(config.num_threads >= 1 && config.num_threads <= 1024,
            "num_threads is " + std::to_string(config.num_threads) + "; it must be 1 to 1024");
    for (const int core : config.cores)
        require(core >= 0 && core < 1024, "cores has " + std::to_string(core) + "; core numbers are 0 to 1023");
    return config;
}

/// Messages are made only for errors, since there are thousands of spans.
void check_order(std::span<const std::vector<Span>> mini_batches) {
    for (std::size_t i = 0; i < mini_batches.size(); ++i) {
        const std::string name = "mini_batches[" + std::to_string(i) + "]: ";
        int last = 0;
        for (const Span& span : mini_batches[i]) {
            if (span.mode < SpanMode::append || span.mode > SpanMode::read)
                throw Error(name + "mode " + std::to_string(std::int64_t(span.mode)) +
                            " is unknown; it must be 0 (append), 1 (attend), 2 (partial) or 3 (read)");
            if (order_of(span.mode) < last) throw Error(name + "spans must come in the order read, attend, partial, append");
            last = order_of(span.mode);
        }
    }
}

}  // namespace rworker
