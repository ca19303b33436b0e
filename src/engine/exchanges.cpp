#include "ballast/core/error.h"

#include "src/engine/handlers.h"

// Passes between the ranks that share the tiles of each matrix.

namespace ballast::engine {

void run_exchange(const CurrentOperation& at) {
  expects(at.problem().tensor > 1, "engine: only tensor places exchange passes");
}

}  // namespace ballast::engine
