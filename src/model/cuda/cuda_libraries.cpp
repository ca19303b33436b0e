#include "ballast/model/cuda_libraries.h"

#include "src/model/cuda/cudnn/fused_attention.h"
#include "src/model/cuda/products/cublaslt.h"

namespace ballast::model {

std::vector<CudaLibrary> cuda_libraries() {
  return {{.name = "cuBLASLt",
           .file = std::string(cuda::cublaslt_file()),
           .refusal = std::string(cuda::cublaslt_refusal())},
          {.name = "cuDNN",
           .file = std::string(cuda::fused_attention_file()),
           .refusal = std::string(cuda::fused_attention_refusal())}};
}

}  // namespace ballast::model
