#pragma once

#include <string>
#include <vector>

namespace ballast::model {

/// A library that the CUDA device loads when it first needs it.
struct CudaLibrary {
  std::string name;     ///< "cuBLASLt"
  std::string file;     ///< where it was loaded from, "" if it was not
  std::string refusal;  ///< why it was not loaded, one line, or ""
};

/// cuBLASLt and cuDNN; loads them. Empty in a program without CUDA.
std::vector<CudaLibrary> cuda_libraries();

}  // namespace ballast::model
