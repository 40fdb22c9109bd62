// What a compiler or a processor does to a path is seen before it serves: it is held against the scalar path.
#pragma once

#include <string>

#include "rworker/kernels.hpp"

namespace rworker {

/// What `tested` computes or stores otherwise than `oracle`, in words; empty if nothing. A few milliseconds: every cache
/// dtype, one and several query rows to a KV head, head sizes and lengths that are no multiples, all scoring rules.
/// Stored bytes and a sequence after its export and import must be the same bit for bit, outputs within the rounding of
/// the cache's dtype.
std::string find_difference(const Kernels& tested, const Kernels& oracle);

/// The same of an instruction set against the scalar path, as a refusal that names what to use instead; empty if all is
/// well. Throws Error for an unknown `isa`.
std::string self_test(const std::string& isa);

}  // namespace rworker
