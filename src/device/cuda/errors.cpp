#include "src/device/cuda/errors.h"

#include <fmt/format.h>

namespace ballast::device {

void check_cuda(cudaError_t code, std::string_view operation) {
  if (code == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());
  throw Error(ErrorCategory::device, fmt::format("{}: CUDA: {} ({})", operation,
                                                 cudaGetErrorString(code), cudaGetErrorName(code)));
}

}  // namespace ballast::device
