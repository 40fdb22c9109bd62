// Types that all parts of the R-worker use: dtypes, layers, errors.
#pragma once

#include <bit>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "rworker/kernels.hpp"
#include "rworker/kinds.hpp"

namespace rworker {

/// Bytes of one element of a floating-point dtype.
inline std::int64_t item_bytes(DType dtype) { return dtype == DType::float32 ? 4 : 2; }

/// Parses a dtype as `parse_model_dtype` does; int8 and int4 are valid too.
DType parse_kv_dtype(const std::string& name);

/// Returns the dtype of a layer's rows in a cache of `kv_dtype`: the keys of an index are not quantised.
inline DType dtype_of(const LayerSpec& layer, DType kv_dtype) {
    return layer.index() && is_quantized(kv_dtype) ? DType::bfloat16 : kv_dtype;
}

/// True where a layer's rows are codes of latents: kernels/latents.hpp.
inline bool has_latent_codes(const LayerSpec& layer, DType kv_dtype) {
    return layer.values_in_keys() && is_quantized(dtype_of(layer, kv_dtype));
}

/// Index of the kernel function that stores a layer's rows.
inline int append_index(const LayerSpec& layer, DType kv_dtype) {
    return int(dtype_of(layer, kv_dtype)) + (has_latent_codes(layer, kv_dtype) ? 2 : 0);
}

/// What happens to a span's rows. append: they are stored. attend: they are stored, then attend. partial: the same at
/// the tail of a longer sequence, and partial results are returned. read: they are not stored; they attend to a closed
/// range of their sequence, and partial results are returned. again, again_partial: one row that is stored already
/// attends as it did in an `attend` or `partial` span; only Worker::attend_again plans them.
enum class SpanMode : std::int64_t { append = 0, attend = 1, partial = 2, read = 3, again = 4, again_partial = 5 };

/// Nodes of the tree in which the splits of `num_tokens` tokens are merged.
inline std::int64_t num_nodes_of(std::int64_t num_tokens) {
    return std::popcount(std::uint64_t((num_tokens - 1) / kSplitTokens + 1));
}

/// `num_rows` new tokens of a sequence with `context_len` committed tokens. The rows of a `read` span come after the
/// sequence's last token, and `context_len` counts the tokens before them from its first.
struct Span {
    std::int64_t sequence_id, context_len, num_rows;
    SpanMode mode;

    bool has_queries() const { return mode != SpanMode::append; }
    bool is_stored() const { return mode < SpanMode::read; }
    bool is_partial() const { return mode != SpanMode::append && mode != SpanMode::attend && mode != SpanMode::again; }
    /// Partial results of each row: nodes of the tree in which the splits of a sequence are merged (kernels/merge.hpp).
    std::int64_t num_nodes() const {
        if (mode == SpanMode::read) return 1;
        return mode == SpanMode::partial ? num_nodes_of(context_len + num_rows) : 0;
    }
};

/// What a control does to the cache before a step's rows.
enum class Verb : std::int64_t { fork = 0, truncate = 1, release = 2, reserve = 3, commit = 4 };

struct Control {
    Verb verb;
    std::int64_t sequence_id, source_id, num_tokens;
};

/// A caller's mistake. The message names the argument and what would be valid. Nothing has changed.
struct Error : std::invalid_argument {
    using std::invalid_argument::invalid_argument;
};

inline void require(bool holds, const std::string& message) {
    if (!holds) throw Error(message);
}

/// The cache has no sequence of this id.
struct UnknownSequence : Error {
    using Error::Error;
};

}  // namespace rworker
