#pragma once

#include <string>
#include <vector>

namespace ballast::model {

/// A library that the CUDA device loads when first needed.
struct CudaLibrary {
  std::string name;     ///< "cuBLASLt"
  std::string file;     ///< path of the loaded file, or ""
  std::string refusal;  ///< one line with the reason why it was not loaded, or ""
};

/// Loads and returns cuBLASLt and cuDNN. Empty in a build without CUDA.
std::vector<CudaLibrary> cuda_libraries();

}  // namespace ballast::model
