// Compares each path with the scalar path before it serves, to detect faults of a compiler or a processor.
#pragma once

#include <string>

#include "rworker/kernels.hpp"

namespace rworker {

/// Describes what `tested` computes or stores differently from `oracle`; empty if nothing. It takes a few milliseconds
/// and covers every cache dtype, one and several query rows per KV head, odd head sizes and lengths, and all scoring
/// rules. Stored bytes, and a sequence after export and import, must be equal bit for bit. Outputs may differ by the
/// rounding of the cache's dtype.
std::string find_difference(const Kernels& tested, const Kernels& oracle);

/// Compares instruction set `isa` with the scalar path. Returns a text that names what to use instead, or "" if they
/// agree. Throws Error for an unknown `isa`.
std::string self_test(const std::string& isa);

}  // namespace rworker
