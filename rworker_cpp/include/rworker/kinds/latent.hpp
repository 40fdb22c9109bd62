// A layer whose cache holds keys only: values are the first value_dim elements of a key, and are sent and stored as
// part of it.
#pragma once

#include "rworker/kinds/numbers.hpp"

namespace rworker {

struct Latent {
    static constexpr const char* kName = "latent";

    // Where this R-worker multiplies K and V (absorption.hpp), a query arrives as `nope_dim` elements, which K turns
    // into value_dim elements, and the elements after value_dim. V turns the output into `out_dim` elements. 0: queries
    // arrive already multiplied.
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
