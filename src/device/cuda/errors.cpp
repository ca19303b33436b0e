#include "src/device/cuda/errors.h"

#include <atomic>

#include <fmt/format.h>

namespace ballast::device {
namespace {

/// Returns whether a kernel caused the error while it ran. Every later call then returns it.
bool is_kernel_fault(cudaError_t code) {
  switch (code) {
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorIllegalInstruction:
    case cudaErrorInvalidPc:
    case cudaErrorHardwareStackError:
    case cudaErrorAssert:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
      return true;
    default:
      return false;
  }
}

std::atomic<int> awaiting = 0;

}  // namespace

WorkIsAwaited::WorkIsAwaited() {
  ++awaiting;
}
WorkIsAwaited::~WorkIsAwaited() {
  --awaiting;
}

std::string_view fault_advice() {
  return awaiting > 0 ? ""
                      : "; a kernel of this or another operation failed: to find it, repeat with "
                        "ballast.gpu_checks=each";
}

void check_cuda(cudaError_t code, std::string_view operation) {
  if (code == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());
  throw Error(ErrorCategory::device,
              fmt::format("{}: CUDA: {} ({}){}", operation, cudaGetErrorString(code),
                          cudaGetErrorName(code), is_kernel_fault(code) ? fault_advice() : ""));
}

}  // namespace ballast::device
