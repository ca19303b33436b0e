#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ballast/core/units.h"

namespace ballast::formats {

// Names of files as Hugging Face's libraries write them.
inline constexpr const char* kSingleWeights = "model.safetensors";
inline constexpr const char* kWeightsIndex = "model.safetensors.index.json";

/// One tensor of a safetensors file.
struct StoredTensor {
  std::string name;
  std::string dtype;  ///< type name in the file: "F32", "BF16", "F16", or another one
  std::vector<std::uint64_t> shape;
  Elems elements = 0;
  Bytes offset = 0;  ///< from the start of the file
  Bytes bytes = 0;
};

}  // namespace ballast::formats
