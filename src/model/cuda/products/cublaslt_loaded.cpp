// Loads the installed cuBLASLt. Tests without a GPU link another definition of these functions.
#include <array>

#include <fmt/format.h>

#include "ballast/core/error.h"

#include "src/model/cuda/products/cublaslt.h"

namespace ballast::model::cuda {
namespace {

const LoadedCublasLt& loaded() {
  static const LoadedCublasLt once = [] {
    const std::string versioned = fmt::format("libcublasLt.so.{}", CUBLAS_VER_MAJOR);
    // First the loader's search path, then the toolkit that the program was built with.
    const std::array<std::string, 3> names = {
        versioned, "libcublasLt.so", fmt::format("{}/{}", BALLAST_CUDA_LIBRARIES, versioned)};
    return load_cublaslt(names);
  }();
  return once;
}

}  // namespace

std::string_view cublaslt_refusal() {
  return loaded().refusal;
}

const CublasLt& cublaslt() {
  if (!loaded().refusal.empty()) throw Error(ErrorCategory::device, loaded().refusal);
  return loaded().functions;
}

}  // namespace ballast::model::cuda
