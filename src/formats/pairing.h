#pragma once

#include <functional>
#include <string>
#include <vector>

#include "ballast/formats/stored_weights.h"

namespace ballast::formats {

/// A tensor that files store in quantised form, and the tensors from which it is dequantised.
struct Pairing {
  StoredTensor dequantized;
  QuantizedWeights quantized;
  /// The tensors of `quantized` except the codes: scales and descriptions.
  std::vector<const StoredTensor*> parts;
};

/// The place of the tensor called `name`; nullptr if there is none.
using FindPlace = std::function<const WeightPlace*(const std::string& name)>;

}  // namespace ballast::formats
