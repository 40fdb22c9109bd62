// A layer whose cache holds keys and values of each token and KV head.
#pragma once

#include "rworker/kinds/numbers.hpp"

namespace rworker {

struct Dense {
    static constexpr const char* kName = "dense";

    template <class Fields>
    static Dense read(const Fields& fields, LayerNumbers& numbers) {
        numbers = read_attending(fields);
        return {};
    }
};

}  // namespace rworker
