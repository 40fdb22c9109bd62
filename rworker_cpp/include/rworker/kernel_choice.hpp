// Which instruction set to use, chosen once at start.
#pragma once

#include <string>
#include <vector>

#include "rworker/kernels.hpp"

namespace rworker {

/// Instruction sets that this build has and this CPU can run, the best last.
std::vector<const Kernels*> supported_kernels();

/// Returns the instruction set `isa` by name. "auto" is FASTDECODE_ISA of the environment where it is set, else the
/// best. Throws Error for other names.
const Kernels& choose_kernels(const std::string& isa);

/// Parses "run", "run-l2" or "pages". Throws Error for other names.
ReadAhead parse_read_ahead(const std::string& name);

}  // namespace rworker
