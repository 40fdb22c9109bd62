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

/// Throws Error unless `streams` is 1 or kStreams; see AttendArgs.
int checked_streams(int streams);

}  // namespace rworker
