#pragma once

#include <algorithm>

#include "ballast/model/architecture.h"

namespace ballast::model {

/// Returns the tensor of a router that is added to the scores of experts for the choice, with
/// StoredRows::addends; nullptr for other blocks.
inline const TensorSpec* correction_biases(const BlockSpec& block) {
  if (block.part != LayerPart::router) return nullptr;
  const auto found = std::ranges::find_if(
      block.tensors, [](const TensorSpec& tensor) { return tensor.stored.addends > 1; });
  return found == block.tensors.end() ? nullptr : &*found;
}

}  // namespace ballast::model
