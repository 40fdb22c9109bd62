// A layer whose cache holds keys alone: values are a key's first value_dim elements, and come and are stored only as such.
#pragma once

#include "rworker/kinds/numbers.hpp"

namespace rworker {

struct Latent {
    static constexpr const char* kName = "latent";

    // Where K and V are multiplied here (absorption.hpp): a query comes as `nope_dim` elements that K makes value_dim of,
    // and those behind value_dim; V makes `out_dim` of the output. 0: queries come absorbed.
    std::int64_t nope_dim = 0, out_dim = 0;

    template <class Fields>
    static Latent read(const Fields& fields, LayerNumbers& numbers) {
        numbers = read_attending(fields);
        if (!fields.has("absorption")) return {};
        const Fields absorption = fields.record("absorption");
        return {absorption.template get<std::int64_t>("nope_dim"), absorption.template get<std::int64_t>("value_dim")};
    }
};

}  // namespace rworker
