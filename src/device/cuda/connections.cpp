#include "src/device/cuda/connections.h"

#include <cstdlib>

namespace ballast::device {

void raise_connections() {
  // Once, because other threads may read the environment later.
  static const int done = setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*replace=*/0);
  static_cast<void>(done);
}

}  // namespace ballast::device
