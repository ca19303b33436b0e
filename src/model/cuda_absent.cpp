#include "ballast/core/error.h"
#include "ballast/model/attention.h"
#include "ballast/model/cuda_libraries.h"

#include "src/model/compute/factories.h"

namespace ballast::model::cuda {
namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorCategory::device,
              "this program was built without CUDA: reconfigure with -Dcuda=enabled or set "
              "ballast.device to \"host\"");
}

}  // namespace

std::unique_ptr<Compute> make_cuda_compute(const Architecture&, DType, MicroBatchShape,
                                           const KernelOptions&) {
  refuse();
}
void require_gpu_for(const ModelConfig&) {
  refuse();
}
double measure_cuda_gemm_peak(device::Device&, DType, double, KernelSet) {
  refuse();
}

}  // namespace ballast::model::cuda

namespace ballast::model {

std::vector<CudaLibrary> cuda_libraries() {
  return {};
}
std::vector<ProductCheck> check_products(const std::function<void()>& work) {
  work();
  return {};
}
Bytes attention_trial_bytes(const AttentionShape&) {
  cuda::refuse();
}
std::unique_ptr<AttentionTrial> make_attention_trial(device::Device&, const AttentionShape&) {
  cuda::refuse();
}

}  // namespace ballast::model
