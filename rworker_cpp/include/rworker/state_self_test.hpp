// The self-test of the kernels of recurrent layers; self_test.hpp has that of attention.
#pragma once

#include <string>

#include "rworker/state_kernels.hpp"

namespace rworker {

/// The state kernels of an instruction set.
const StateKernels& state_kernels(const Kernels& kernels);

/// Describes what `tested` computes or keeps differently from `oracle`; empty if nothing.
std::string find_difference(const StateKernels& tested, const StateKernels& oracle);

}  // namespace rworker
