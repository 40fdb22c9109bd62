// A layer in which each query picks the tokens that the following layers read. It computes no attention.
#pragma once

#include "rworker/kinds/numbers.hpp"

namespace rworker {

struct Index {
    static constexpr const char* kName = "index";

    // A query picks at most `picks` tokens by their score: the sum over all heads of relu(q . k) * weight. Where
    // `block` is given, each head picks `picks` blocks of `block` tokens by the largest q . k in a block. It first
    // takes the query's own block and those before it, `local` in all.
    std::int64_t picks = 0, block = 0, local = 0;

    template <class Fields>
    static Index read(const Fields& fields, LayerNumbers& numbers) {
        numbers = {.num_heads = fields.template get<std::int64_t>("num_heads"),
                   .num_kv_heads = 1,
                   .key_dim = fields.template get<std::int64_t>("key_head_dim"),
                   .value_dim = 1,
                   .scale = fields.template get<float>("scale"),
                   .window = 0,
                   .soft_cap = 0.0f,
                   .sinks = {}};
        return {fields.template get<std::int64_t>("picks"), fields.template get<std::int64_t>("pick_block"),
                fields.template get<std::int64_t>("pick_local")};
    }
};

}  // namespace rworker
