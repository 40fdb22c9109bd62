// The numbers of a layer that kernels of every kind read.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace rworker {

constexpr std::int64_t round_up16(std::int64_t n) { return (n + 15) / 16 * 16; }

/// Shape and scoring rule of one layer.
struct LayerNumbers {
    std::int64_t num_heads, num_kv_heads, key_dim, value_dim;
    float scale;
    std::int64_t window;       // tokens a query sees, itself included; 0: all
    float soft_cap;            // 0: none
    std::vector<float> sinks;  // one logit per query head, or empty
    // ALiBi, one per query head, or empty: a score gains slope * (position of the key - position of the query)
    std::vector<float> alibi_slopes = {};
    bool chunked = false;         // a query sees the tokens of its chunk: from the last multiple of `window` on
    std::int64_t picked_by = -1;  // index layer that picks what this layer's queries see; -1: they see all
};

/// Reads the numbers of a layer with attention. `fields`: a record whose values `get<Value>(name)` returns.
template <class Fields>
LayerNumbers read_attending(const Fields& fields) {
    return {
        .num_heads = fields.template get<std::int64_t>("num_heads"),
        .num_kv_heads = fields.template get<std::int64_t>("num_kv_heads"),
        .key_dim = fields.template get<std::int64_t>("key_head_dim"),
        .value_dim = fields.template get<std::int64_t>("value_head_dim"),
        .scale = fields.template get<float>("scale"),
        .window = fields.template get<std::int64_t>("window"),
        .soft_cap = fields.template get<float>("soft_cap"),
        .sinks = fields.template get<std::vector<float>>("sinks"),
        .alibi_slopes = fields.template get<std::vector<float>>("alibi_slopes"),
        .chunked = fields.template get<bool>("chunked"),
        .picked_by = fields.template get<std::int64_t>("picked_by"),
    };
}

}  // namespace rworker
