// The same of the kernels of recurrent layers as self_test.hpp of those that attend.
#pragma once

#include <string>

#include "rworker/state_kernels.hpp"

namespace rworker {

/// The kernels that go with an instruction set.
const StateKernels& state_kernels(const Kernels& kernels);

/// What `tested` computes or keeps otherwise than `oracle`, in words; empty if nothing.
std::string find_difference(const StateKernels& tested, const StateKernels& oracle);

}  // namespace rworker
