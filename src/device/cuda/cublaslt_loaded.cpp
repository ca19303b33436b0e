// Loads the installed cuBLASLt. Tests without a GPU link another definition of these functions.
#include "ballast/core/error.h"

#include "src/device/cuda/libraries.h"

namespace ballast::device {
namespace {

const LoadedCublasLt& loaded() {
  static const LoadedCublasLt once =
      load_cublaslt(library_names("libcublasLt.so", CUBLAS_VER_MAJOR));
  return once;
}

}  // namespace

std::string_view cublaslt_refusal() {
  return loaded().refusal;
}

std::string_view cublaslt_file() {
  return loaded().file;
}

const CublasLt& cublaslt() {
  if (!loaded().refusal.empty()) throw Error(ErrorCategory::device, loaded().refusal);
  return loaded().functions;
}

}  // namespace ballast::device
