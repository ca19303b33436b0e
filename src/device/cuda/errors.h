#pragma once

#include <string_view>

#include <cuda_runtime_api.h>

#include "ballast/core/error.h"

namespace ballast::device {

/// Throws Error(device) "OPERATION: CUDA: TEXT (NAME)" unless `code` is cudaSuccess. Clears what
/// the runtime remembers of a failed call, so that the next one does not report it again; an error
/// that has ended the context comes back by itself.
void check_cuda(cudaError_t code, std::string_view operation,
                SourceLocation where = SourceLocation::current());

/// Ends a CUDA object in a destructor: at the end of the program the driver may be gone before it,
/// and then there is nothing to end and nobody to tell.
template <auto end>
struct CudaEnd {
  template <class T>
  void operator()(T* object) const noexcept {
    if (end(object) != cudaSuccess) static_cast<void>(cudaGetLastError());
  }
};

}  // namespace ballast::device
