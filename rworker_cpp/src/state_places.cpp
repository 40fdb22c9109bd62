#include "rworker/state_places.hpp"

#include <algorithm>
#include <ranges>
#include <string>

namespace rworker {
namespace {

std::int64_t pending_floats(const StateSpec& state) {
    return state.groups * round_up16(state.key_dim) + state.heads * round_up16(state.value_dim);
}

}  // namespace

StateKind parse_recurrence(const std::string& name, const std::string& where) {
    const char* const names[] = {"delta", "scan", "window", "selective", "lru"};
    const auto found = std::find(std::begin(names), std::end(names), name);
    if (found == std::end(names))
        throw Error(where + ".recurrence is '" + name + "'; it must be delta, scan, window, selective or lru");
    return StateKind(found - std::begin(names));
}

void check_state(const StateSpec& spec, const char* name) {
    constexpr std::int64_t kMost = 1 << 12;
    const std::string of = std::string(name) + "state: ";
    const bool selective = spec.kind == StateKind::selective, lru = spec.kind == StateKind::lru;
    require(spec.kind >= StateKind::delta && spec.kind <= StateKind::lru, of + "kind is unknown");
    require(spec.heads >= 1 && spec.heads <= kMost && spec.value_dim >= 1 && spec.value_dim <= kMost,
            of + "heads and value_dim must be 1 to " + std::to_string(kMost));
    require(lru || spec.kind == StateKind::window
                ? spec.groups == 0 && spec.key_dim == (lru ? 1 : 0)
                : spec.groups >= 1 && spec.heads % spec.groups == 0 && spec.key_dim >= 1 && spec.key_dim <= kMost,
            of + "groups must divide heads, and key_dim be 1 to " + std::to_string(kMost) +
                "; 0 and 0 for a window, 0 and 1 for an lru");
    require(spec.taps >= 1 && spec.taps <= 16, of + "taps must be 1 to 16");
    require(spec.numbers() == 0 || spec.by_channel() || spec.decays == 1 || spec.decays == spec.key_dim,
            of + "decays must be 1 or key_dim");
    require(std::int64_t(spec.filters.size()) == spec.taps * spec.channels() || (spec.taps == 1 && spec.filters.empty()),
            of + "filters must be taps x channels, or none for one tap");
    require(std::int64_t(spec.factors.size()) == (selective ? spec.key_dim * spec.heads * spec.value_dim : 0),
            of + "factors must be key_dim x heads x value_dim for a selective one, and none for others");
    require(std::ranges::all_of(spec.factors, [](float x) { return x <= 0.0f; }), of + "factors must not be above 0");
    require(spec.kept_rows >= 0 && spec.kept_rows <= kMost, of + "kept_rows must be 0 to " + std::to_string(kMost));
    require(spec.bias.empty() || std::int64_t(spec.bias.size()) == spec.channels(), of + "bias must be one per channel");
    require(spec.skip.empty() || std::int64_t(spec.skip.size()) == spec.heads, of + "skip must be one per head");
}

StatePlaces::StatePlaces(const std::vector<LayerSpec>& layers, const std::vector<LayerLayout>& layouts) {
    for (const LayerSpec& layer : layers) {
        if (layer.state()) row_floats_ = std::max(row_floats_, row_floats(*layer.state()));
        if (layer.state()) most_kept_ = std::max(most_kept_, layer.state()->kept_rows);
        keeps_single_ |= layer.state() && layer.state()->keeps_single;
    }
    place_kept(layers);
    if (row_floats_ == 0) return;
    for (const LayerSpec& layer : layers) {
        first_rows_.push_back(num_rows_);
        if (!layer.state()) continue;
        const StateSpec& state = *layer.state();
        num_rows_ += (state.taps - 1) * (2 * state.groups * rows_of(state.key_dim) + state.heads * rows_of(state.value_dim));
        num_rows_ += state.heads * state.key_dim;
    }
    first_rows_.push_back(num_rows_);
    for (const LayerLayout& layout : layouts)
        for (std::int64_t i = 0, all = layout.block_bytes / (4 * row_floats_); i < all; ++i)
            places_.push_back({layout.region_offset_bytes + i * 4 * row_floats_, layout.block_bytes, all - i});
    require(!places_.empty(), "a block has no room for a row of a state, " + std::to_string(4 * row_floats_) +
                                  " bytes in one layer; give a larger block_size");
    num_filled_ = (num_rows_ + std::int64_t(places_.size()) - 1) / std::int64_t(places_.size());
    std::int64_t block_bytes = 0;
    for (const LayerLayout& layout : layouts) block_bytes += layout.block_bytes;
    num_blocks_ = num_filled_ + (2 * kept_bytes() + block_bytes - 1) / block_bytes;  // of this step and of the last one
}

/// Rows are as wide as those of float32, and each layer's rows begin at a cache line.
void StatePlaces::place_kept(const std::vector<LayerSpec>& layers) {
    constexpr std::int64_t kLine = 64;
    std::int64_t end = 0;
    for (const LayerSpec& layer : layers) {
        kept_offsets_.push_back(end);
        if (layer.state()) end += most_kept_ * 4 * (layer.state()->channels() + layer.state()->numbers());
        end = (end + kLine - 1) / kLine * kLine;
        pending_offsets_.push_back(end);
        if (layer.state() && layer.state()->has_matrix() && most_kept_) end += 4 * pending_floats(*layer.state());
    }
    kept_offsets_.push_back(end);
}

std::int64_t StatePlaces::query_window(const LayerSpec& layer, std::int64_t layer_index, std::int64_t group) const {
    return first_rows_[layer_index] + group * (layer.state()->taps - 1) * rows_of(layer.state()->key_dim);
}

std::int64_t StatePlaces::key_window(const LayerSpec& layer, std::int64_t layer_index, std::int64_t group) const {
    return query_window(layer, layer_index, layer.state()->groups + group);
}

std::int64_t StatePlaces::value_window(const LayerSpec& layer, std::int64_t layer_index, std::int64_t head) const {
    return query_window(layer, layer_index, 2 * layer.state()->groups) +
           head * (layer.state()->taps - 1) * rows_of(layer.state()->value_dim);
}

std::int64_t StatePlaces::matrix(const LayerSpec& layer, std::int64_t layer_index, std::int64_t head) const {
    return value_window(layer, layer_index, layer.state()->heads) + head * layer.state()->key_dim;
}

}  // namespace rworker
