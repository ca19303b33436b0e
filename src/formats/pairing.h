#pragma once

#include <functional>
#include <string>
#include <vector>

#include "ballast/formats/stored_weights.h"

namespace ballast::formats {

/// A tensor of files that hold codes of it, and the tensors that it is decoded from.
struct Pairing {
  StoredTensor decoded;
  CodedWeights coded;
  /// Of `coded` and what describes it, without the codes.
  std::vector<const StoredTensor*> parts;
};

/// The place of the tensor with this very name; nullptr if there is none.
using FindPlace = std::function<const WeightPlace*(const std::string& name)>;

}  // namespace ballast::formats
