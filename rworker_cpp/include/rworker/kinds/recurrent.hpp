// A layer that caches no tokens and keeps a state per sequence. Of its numbers, only heads and value_dim are used.
#pragma once

#include <algorithm>
#include <iterator>
#include <memory>
#include <stdexcept>

#include "rworker/kinds/numbers.hpp"
#include "rworker/state_spec.hpp"

namespace rworker {

/// Parses float32, float16 or bfloat16. Throws Error for other names.
DType parse_model_dtype(const std::string& name);

/// Parses the name of a recurrence. Throws Error, with a message that begins with `where`, for other names.
StateKind parse_recurrence(const std::string& name, const std::string& where);

struct Recurrent {
    static constexpr const char* kName = "recurrent";

    std::shared_ptr<const StateSpec> state;

    template <class Fields>
    static Recurrent read(const Fields& fields, LayerNumbers& numbers) {
        numbers = {.num_heads = fields.template get<std::int64_t>("num_heads"),
                   .num_kv_heads = 0,
                   .key_dim = 0,
                   .value_dim = fields.template get<std::int64_t>("value_head_dim"),
                   .scale = 1.0f,
                   .window = 0,
                   .soft_cap = 0.0f,
                   .sinks = {}};
        return {std::make_shared<const StateSpec>(StateSpec{
            .kind = parse_recurrence(fields.template get<std::string>("recurrence"), fields.name()),
            .heads = numbers.num_heads,
            .groups = fields.template get<std::int64_t>("groups"),
            .key_dim = fields.template get<std::int64_t>("key_dim"),
            .value_dim = numbers.value_dim,
            .taps = fields.template get<std::int64_t>("taps"),
            .decays = fields.template get<std::int64_t>("decays"),
            .silu = fields.template get<bool>("silu"),
            .norm = fields.template get<bool>("norm"),
            .scale = fields.template get<float>("scale"),
            .filters = fields.float_bytes("filters"),
            .bias = fields.float_bytes("bias"),
            .skip = fields.float_bytes("skip"),
            .factors = fields.float_bytes("factors"),
            .kept_rows = fields.template get<std::int64_t>("kept_rows"),
            .dtype = parse_model_dtype(fields.template get<std::string>("dtype")),
            .keeps_single = fields.template get<bool>("keeps_single"),
        })};
    }
};

}  // namespace rworker
