// A layer of which each query picks what the layers after it read, and attends to nothing.
#pragma once

#include "rworker/kinds/numbers.hpp"

namespace rworker {

struct Index {
    static constexpr const char* kName = "index";

    // A query picks at most `picks` tokens by their score: the sum of relu(q . k) * weight over all heads. Where `block` is
    // given, each head picks as many blocks of so many tokens by its largest q . k there, the query's own block and those
    // before it, `local` in all, first.
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
