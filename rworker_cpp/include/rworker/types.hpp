// What every part of the R-worker agrees on: dtypes, layers, errors.
#pragma once

#include <bit>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "rworker/kernels.hpp"
#include "rworker/state_spec.hpp"

namespace rworker {

/// Bytes of one element of a floating-point dtype.
inline std::int64_t item_bytes(DType dtype) { return dtype == DType::float32 ? 4 : 2; }

/// float32, float16 or bfloat16 by name; throws Error for any other.
DType parse_model_dtype(const std::string& name);

/// The same, or int8 or int4.
DType parse_kv_dtype(const std::string& name);

constexpr std::int64_t round_up16(std::int64_t n) { return (n + 15) / 16 * 16; }

/// Shape and scoring rule of one attention layer.
struct LayerSpec {
    std::int64_t num_heads, num_kv_heads, key_dim, value_dim;
    float scale;
    std::int64_t window;       // tokens a query sees, itself included; 0: all
    float soft_cap;            // 0: none
    std::vector<float> sinks;  // one logit per query head, or empty
    // ALiBi, one per query head, or empty: a score gains slope * (position of the key - position of the query)
    std::vector<float> alibi_slopes = {};
    bool values_in_keys = false;  // values are a key's first value_dim elements, and come and are stored only as such
    bool chunked = false;         // a query sees those of its chunk: from the last multiple of `window` on
    // An index layer: each of its queries picks what the layers after it read, and attends to nothing. It picks at most
    // `picks` tokens (0: this is no index layer) by their score: the sum of relu(q . k) * weight over all heads. Where
    // `pick_block` is given, each head picks as many blocks of so many tokens by its largest q . k there, the query's own
    // block and those before it, `pick_local` in all, first.
    std::int64_t picks = 0, pick_block = 0, pick_local = 0;
    std::int64_t picked_by = -1;  // the index layer that picks what this layer's queries see; -1: they see all

    // Where a latent layer's K and V are multiplied here (absorption.hpp): a query comes as `absorbed_nope` elements that K
    // makes value_dim of, and those behind value_dim; V makes `absorbed_value` of the output. 0: they come absorbed.
    std::int64_t absorbed_nope = 0, absorbed_value = 0;

    // A recurrent layer's, which caches nothing of a token: num_kv_heads is 0, and the other numbers are not used
    std::shared_ptr<const StateSpec> state = {};

    std::int64_t stored_value_dim() const { return values_in_keys ? 0 : value_dim; }
    bool weighs_heads() const { return picks > 0 && pick_block == 0; }
    /// Elements of a query: where heads are weighed, a float32 comes behind it, in the first bytes of two elements.
    std::int64_t query_dim() const { return key_dim + (weighs_heads() ? 2 : 0); }
    bool absorbs() const { return absorbed_nope > 0; }
    /// Elements of a query, and of an output, as they travel.
    std::int64_t sent_query_dim() const { return absorbs() ? absorbed_nope + key_dim - value_dim : query_dim(); }
    std::int64_t sent_value_dim() const { return absorbs() ? absorbed_value : value_dim; }
    /// Heads of an index layer that pick by themselves.
    std::int64_t pick_heads() const { return pick_block == 0 ? 1 : num_heads; }
    /// A row of partial results: of an index layer, ranks of `picks` scores, as 4 bytes each.
    std::int64_t partial_heads() const { return picks > 0 ? pick_heads() : num_heads; }
    std::int64_t partial_floats() const { return picks > 0 ? picks : node_floats(sent_value_dim()); }
    /// Where single tokens are read, each key is kept in one piece: the keys of full tiles lie as those of the last.
    bool keeps_rows() const { return picked_by >= 0 && values_in_keys; }
    std::int64_t group() const { return num_heads / num_kv_heads; }

    /// The first token that a query at `position` sees; it never falls as positions grow.
    std::int64_t first_seen(std::int64_t position) const {
        if (window == 0) return 0;
        return chunked ? position - position % window : position < window ? 0 : position - window + 1;
    }

    bool same_work(const LayerSpec& other) const {
        return num_heads == other.num_heads && num_kv_heads == other.num_kv_heads && key_dim == other.key_dim &&
               value_dim == other.value_dim && window == other.window && values_in_keys == other.values_in_keys &&
               chunked == other.chunked &&
               picks == other.picks && pick_block == other.pick_block && pick_local == other.pick_local &&
               picked_by == other.picked_by;
    }
};

/// What a layer's rows are kept in, in a cache of `kv_dtype`: the keys of an index have no codes.
inline DType dtype_of(const LayerSpec& layer, DType kv_dtype) {
    return layer.picks > 0 && is_quantized(kv_dtype) ? DType::bfloat16 : kv_dtype;
}

/// Whether a layer's rows are codes of latents: kernels/latents.hpp.
inline bool has_latent_codes(const LayerSpec& layer, DType kv_dtype) {
    return layer.values_in_keys && is_quantized(dtype_of(layer, kv_dtype));
}

/// Which of the kernels' functions stores a layer's rows.
inline int append_index(const LayerSpec& layer, DType kv_dtype) {
    return int(dtype_of(layer, kv_dtype)) + (has_latent_codes(layer, kv_dtype) ? 2 : 0);
}

/// What is done with a span's rows: stored only; stored, then they attend; the same of the tail of a longer sequence,
/// answered with partial results; or they are not stored, and attend to a closed range of theirs, likewise.
enum class SpanMode : std::int64_t { append = 0, attend = 1, partial = 2, read = 3 };

/// `num_rows` new tokens of one sequence that has `context_len` committed tokens; those of a `read` span come after the
/// sequence's, with `context_len` tokens before them, counted from its first.
struct Span {
    std::int64_t sequence_id, context_len, num_rows;
    SpanMode mode;

    bool has_queries() const { return mode != SpanMode::append; }
    bool is_stored() const { return mode != SpanMode::read; }
    bool is_partial() const { return mode == SpanMode::partial || mode == SpanMode::read; }
    /// Partial results of each row: nodes of the tree in which a sequence's splits are merged (kernels/merge.hpp).
    std::int64_t num_nodes() const {
        if (mode == SpanMode::read) return 1;
        return mode == SpanMode::partial ? std::popcount(std::uint64_t((context_len + num_rows - 1) / kSplitTokens + 1))
                                         : 0;
    }
};

/// What a control asks of the cache before a step's rows.
enum class Verb : std::int64_t { fork = 0, truncate = 1, release = 2, reserve = 3, commit = 4 };

struct Control {
    Verb verb;
    std::int64_t sequence_id, source_id, num_tokens;
};

/// A caller's mistake; the message names the argument and what would be right. Nothing has changed.
struct Error : std::invalid_argument {
    using std::invalid_argument::invalid_argument;
};

inline void require(bool holds, const std::string& message) {
    if (!holds) throw Error(message);
}

/// A sequence id the cache does not hold.
struct UnknownSequence : Error {
    using Error::Error;
};

}  // namespace rworker
