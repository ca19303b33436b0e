#pragma once

#include <string_view>

#include <cuda_runtime_api.h>

#include "ballast/core/error.h"

namespace ballast::device {

/// Throws Error(device) "OPERATION: CUDA: TEXT (NAME)" unless `code` is cudaSuccess. Clears the
/// runtime's last error, so that the next call does not report it again; an error that destroyed
/// the context returns anyway. Kernels run later than their launch, so an error of a running kernel
/// may be reported by any later call; the text then says how to find the kernel.
void check_cuda(cudaError_t code, std::string_view operation);

/// Returns advice for errors of a library that an earlier fault of a kernel may have caused, "; a
/// kernel ...". Empty if all work is awaited.
std::string_view fault_advice();

/// While one exists, all work of this process is awaited operation by operation (model::GpuChecks),
/// so that check_cuda() does not blame others.
class WorkIsAwaited {
 public:
  WorkIsAwaited();
  ~WorkIsAwaited();
  WorkIsAwaited(const WorkIsAwaited&) = delete;
  WorkIsAwaited& operator=(const WorkIsAwaited&) = delete;
};

/// Deleter of a CUDA object. Ignores errors: at program exit the driver may already be unloaded.
template <auto end>
struct CudaEnd {
  template <class T>
  void operator()(T* object) const noexcept {
    if (end(object) != cudaSuccess) static_cast<void>(cudaGetLastError());
  }
};

}  // namespace ballast::device
