#pragma once

#include "ballast/core/units.h"

namespace ballast::model {

/// How a device computes the MLPs of layers and experts.
struct MlpRule {
  /// Upper limit for the arrays [N, intermediate_size] of an MLP that exist at a time.
  Bytes bytes = 0;
  /// Whether one product computes gate and up.
  bool joins_gate_and_up = false;
};

}  // namespace ballast::model
