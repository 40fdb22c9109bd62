// May this process use the tile registers (AMX)?
#pragma once

namespace rworker {

/// True where processor, hypervisor and kernel all grant it; asked once per process.
bool tiles_granted();

}  // namespace rworker
