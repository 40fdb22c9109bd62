// What every part of the R-worker agrees on: dtypes, layers, errors.
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

/// The same as `parse_model_dtype`, or int8 or int4.
DType parse_kv_dtype(const std::string& name);

/// What a layer's rows are kept in, in a cache of `kv_dtype`: the keys of an index have no codes.
inline DType dtype_of(const LayerSpec& layer, DType kv_dtype) {
    return layer.index() && is_quantized(kv_dtype) ? DType::bfloat16 : kv_dtype;
}

/// Whether a layer's rows are codes of latents: kernels/latents.hpp.
inline bool has_latent_codes(const LayerSpec& layer, DType kv_dtype) {
    return layer.values_in_keys() && is_quantized(dtype_of(layer, kv_dtype));
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
