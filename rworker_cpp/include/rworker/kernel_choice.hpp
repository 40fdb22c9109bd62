// Which instruction set to use, chosen once at start.
#pragma once

#include <string>
#include <vector>

#include "rworker/kernels.hpp"

namespace rworker {

/// What was built and this CPU can run, best last.
std::vector<const Kernels*> supported_kernels();

/// `isa` by name; "auto" is the environment's FASTDECODE_ISA where set, else the best. Throws Error for others.
const Kernels& choose_kernels(const std::string& isa);

/// "run", "run-l2" or "pages". Throws Error for others.
ReadAhead parse_read_ahead(const std::string& name);

}  // namespace rworker
