// Loads the installed cuBLASLt, which src/model/cuda uses. Tests without a GPU link another
// definition.
#include <cuda_runtime_api.h>

#include "src/device/cuda/libraries.h"
#include "src/device/factories.h"
#include "src/device/shared_library.h"

namespace ballast::device {

std::string missing_gpu_library() {
  constexpr int kMajor = CUDART_VERSION / 1000;  // also of cuBLASLt
  return load_first(library_names("libcublasLt.so", kMajor),
                    "install CUDA's cuBLAS or add its folder to LD_LIBRARY_PATH",
                    [](Symbols&) { return std::string(); });
}

}  // namespace ballast::device
