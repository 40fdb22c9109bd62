// In place of src/tile_permission.cpp where tiles are emulated.
#include "tile_permission.hpp"

namespace rworker {
bool tiles_granted() { return true; }
}  // namespace rworker
