#include "ballast/model/cuda_libraries.h"

#include "src/device/cuda/cublaslt.h"
#include "src/model/cuda/cudnn/fused_attention.h"

namespace ballast::model {

std::vector<CudaLibrary> cuda_libraries() {
  return {{.name = "cuBLASLt",
           .file = std::string(device::cublaslt_file()),
           .refusal = std::string(device::cublaslt_refusal())},
          {.name = "cuDNN",
           .file = std::string(cuda::fused_attention_file()),
           .refusal = std::string(cuda::fused_attention_refusal())}};
}

}  // namespace ballast::model
