// May this process use the tile registers (AMX)?
#pragma once

namespace rworker {

/// Whether processor, hypervisor and kernel all grant it; asked for once per process.
bool tiles_granted();

}  // namespace rworker
