// Loads the installed cuDNN. Tests without a GPU link another definition of these functions.
#include "ballast/core/error.h"

#include "src/device/cuda/libraries.h"
#include "src/model/cuda/cudnn/cudnn.h"

namespace ballast::model::cuda {
namespace {

const LoadedCudnn& loaded() {
  static const LoadedCudnn once = load_cudnn(device::library_names("libcudnn.so", CUDNN_MAJOR));
  return once;
}

}  // namespace

std::string_view cudnn_refusal() {
  return loaded().refusal;
}

std::string_view cudnn_file() {
  return loaded().file;
}

const Cudnn& cudnn() {
  if (!loaded().refusal.empty()) throw Error(ErrorCategory::device, loaded().refusal);
  return loaded().functions;
}

}  // namespace ballast::model::cuda
