#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/device/host_stream.h"
#include "ballast/model/attention.h"
#include "ballast/model/compute.h"

#include "src/model/cuda/factories.h"
#include "src/model/host/factories.h"
#include "src/model/host/products.h"

namespace ballast::model {
namespace {

bool is_cuda(std::string_view kind) {
  if (kind == "host" || kind == "cuda") return kind == "cuda";
  throw Error(ErrorCategory::device,
              fmt::format("device '{}' has no model kernels; use host or cuda", kind));
}

void require_shape(const Architecture& model, MicroBatchShape shape) {
  if (shape.sequences == 0 || shape.length == 0 || shape.parts == 0) {
    throw Error(ErrorCategory::config,
                fmt::format("a micro-batch of {} sequences of {} tokens is empty", shape.sequences,
                            shape.length));
  }
  if (!model.outer.positions.empty() && shape.whole_length() > model.config.max_sequence) {
    throw Error(ErrorCategory::config,
                fmt::format("sequences have {} tokens, but the model has only {} positions; raise "
                            "model.max_sequence or shorten data.sequence_length",
                            shape.whole_length(), model.config.max_sequence));
  }
}

}  // namespace

std::unique_ptr<Compute> make_compute(device::Device& device, const Architecture& model, DType type,
                                      MicroBatchShape shape, const KernelOptions& options) {
  const bool cuda = is_cuda(device.kind());
  require_shape(model, shape);
  if (cuda) {
    cuda::require_gpu_for(model.config);
    return cuda::make_cuda_compute(model, type, shape, options);
  }
  return host::make_host_compute(device, model, type, shape);
}

KernelSizes kernel_memory(const Architecture& model, DType type, MicroBatchShape shape,
                          std::string_view device_kind, int compute_threads) {
  const bool cuda = is_cuda(device_kind);
  require_shape(model, shape);
  const int threads = compute_threads > 0 ? compute_threads : device::default_compute_threads();
  // All tensor places need the same memory.
  const auto first =
      model.split.tensor > 1 ? std::make_unique<Architecture>(at_tensor_place(model, 0)) : nullptr;
  const Architecture& own = first ? *first : model;
  const auto compute =
      cuda ? cuda::make_cuda_compute(own, type, shape, {.attention = AttentionBackend::own})
           : host::make_host_compute(own, type, shape, static_cast<std::size_t>(threads));
  return compute->sizes();
}

double attention_flops(const AttentionShape& e, AttentionPass pass) {
  const double products = pass == AttentionPass::own_backward ? 5.0 : 2.0;
  const auto length = static_cast<double>(e.length);
  const double pairs = length * length / 2.0;
  return products * 2.0 * pairs * static_cast<double>(e.sequences * e.heads * e.head_dim);
}

std::string host_kernels(int threads) {
  return host::describe_arithmetic(static_cast<std::size_t>(threads));
}

double measure_gemm_peak(device::Device& device, DType type, double seconds, KernelSet set) {
  if (is_cuda(device.kind())) return cuda::measure_cuda_gemm_peak(device, type, seconds, set);
  return host::measure_host_gemm_peak(device, type, seconds);
}

}  // namespace ballast::model
