// Loads the installed cuDNN. Tests without a GPU link another definition of these functions.
#include <array>

#include <fmt/format.h>

#include "ballast/core/error.h"

#include "src/model/cuda/cudnn/cudnn.h"

namespace ballast::model::cuda {
namespace {

const LoadedCudnn& loaded() {
  static const LoadedCudnn once = [] {
    const std::string versioned = fmt::format("libcudnn.so.{}", CUDNN_MAJOR);
    // First the loader's search path, then the folder of the toolkit's libraries.
    const std::array<std::string, 3> names = {
        versioned, "libcudnn.so", fmt::format("{}/{}", BALLAST_CUDA_LIBRARIES, versioned)};
    return load_cudnn(names);
  }();
  return once;
}

}  // namespace

std::string_view cudnn_refusal() {
  return loaded().refusal;
}

const Cudnn& cudnn() {
  if (!loaded().refusal.empty()) throw Error(ErrorCategory::device, loaded().refusal);
  return loaded().functions;
}

}  // namespace ballast::model::cuda
