// A layer: the numbers that all kinds have, and the record of its own kind. A new kind is one file in kinds/ and one
// name here.
#pragma once

#include <variant>

#include "rworker/kinds/dense.hpp"
#include "rworker/kinds/index.hpp"
#include "rworker/kinds/latent.hpp"
#include "rworker/kinds/recurrent.hpp"
#include "rworker/kernels.hpp"

namespace rworker {

using Kind = std::variant<Dense, Latent, Index, Recurrent>;

struct LayerSpec : LayerNumbers {
    Kind kind = Dense{};

    const Index* index() const { return std::get_if<Index>(&kind); }
    const Latent* latent() const { return std::get_if<Latent>(&kind); }
    /// A recurrent layer's state; null where tokens are cached.
    const StateSpec* state() const {
        const Recurrent* const recurrent = std::get_if<Recurrent>(&kind);
        return recurrent ? recurrent->state.get() : nullptr;
    }

    bool values_in_keys() const { return latent() || index(); }
    std::int64_t stored_value_dim() const { return values_in_keys() ? 0 : value_dim; }
    bool weighs_heads() const { return index() && index()->block == 0; }
    /// Elements of a query. Where heads are weighed, a float32 weight follows it and takes two elements.
    std::int64_t query_dim() const { return key_dim + (weighs_heads() ? 2 : 0); }
    bool absorbs() const { return latent() && latent()->nope_dim > 0; }
    /// Elements of a query, and of an output, as they are sent.
    std::int64_t sent_query_dim() const { return absorbs() ? latent()->nope_dim + key_dim - value_dim : query_dim(); }
    std::int64_t sent_value_dim() const { return absorbs() ? latent()->out_dim : value_dim; }
    /// Heads of an index layer that pick separately.
    std::int64_t pick_heads() const { return weighs_heads() ? 1 : num_heads; }
    /// Heads in a row of partial results. An index layer's partial results are ranks of `picks` scores, 4 bytes each.
    std::int64_t partial_heads() const { return index() ? pick_heads() : num_heads; }
    std::int64_t partial_floats() const { return index() ? index()->picks : node_floats(sent_value_dim()); }
    /// True where single tokens are read: then each key stays in one piece, so that full tiles have the layout of the
    /// last one.
    bool keeps_rows() const { return picked_by >= 0 && values_in_keys(); }
    std::int64_t group() const { return num_heads / num_kv_heads; }

    /// The first token that a query at `position` sees. It never decreases as positions grow.
    std::int64_t first_seen(std::int64_t position) const {
        if (window == 0) return 0;
        return chunked ? position - position % window : position < window ? 0 : position - window + 1;
    }

    bool same_work(const LayerSpec& other) const {
        const Index none{}, &own = index() ? *index() : none, &others = other.index() ? *other.index() : none;
        return num_heads == other.num_heads && num_kv_heads == other.num_kv_heads && key_dim == other.key_dim &&
               value_dim == other.value_dim && window == other.window && kind.index() == other.kind.index() &&
               chunked == other.chunked && picked_by == other.picked_by && own.picks == others.picks &&
               own.block == others.block && own.local == others.local;
    }
};

/// Reads a layer from the record `fields`; its field `kind` names the kind. Returns false where the kind is unknown.
template <class Fields, std::size_t... I>
bool read_kind(const Fields& fields, const std::string& name, LayerSpec& layer, std::index_sequence<I...>) {
    const auto read = [&]<class Own>(std::in_place_type_t<Own>) {
        if (name != Own::kName) return false;
        layer.kind = Own::read(fields, layer);
        return true;
    };
    return (read(std::in_place_type<std::variant_alternative_t<I, Kind>>) || ...);
}

template <class Fields>
bool read_layer(const Fields& fields, LayerSpec& layer) {
    return read_kind(fields, fields.template get<std::string>("kind"), layer,
                     std::make_index_sequence<std::variant_size_v<Kind>>());
}

}  // namespace rworker
