#include "ballast/model/compute.h"

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/device/host_stream.h"
#include "ballast/model/attention_trial.h"

#include "src/model/cuda/factories.h"
#include "src/model/host/factories.h"

namespace ballast::model {
namespace {

/// Throws unless it is one of the two.
bool is_cuda(std::string_view kind) {
  if (kind == "host" || kind == "cuda") return kind == "cuda";
  throw Error(ErrorCategory::device,
              fmt::format("device '{}' has no model kernels; use device host or cuda", kind));
}

void require_type(DType type) {
  if (type == DType::f32 || type == DType::bf16) return;
  throw Error(ErrorCategory::config,
              fmt::format("{} is no training type; choose f32 or bf16", to_string(type)));
}

void require_shape(const ModelConfig& config, MicroBatchShape shape) {
  if (shape.sequences == 0 || shape.length == 0) {
    throw Error(ErrorCategory::config,
                fmt::format("a micro-batch of {} sequences of {} tokens is empty", shape.sequences,
                            shape.length));
  }
  if (config.family == Family::gpt2 && shape.length > config.max_sequence) {
    throw Error(ErrorCategory::config,
                fmt::format("sequences of {} tokens, but the model has only {} positions; raise "
                            "model.max_sequence or shorten data.sequence_length",
                            shape.length, config.max_sequence));
  }
}

}  // namespace

AttentionBy parse_attention_by(std::string_view name) {
  if (name == "own") return AttentionBy::own;
  if (name == "cudnn") return AttentionBy::cudnn;
  expects(name == "auto", "attention by something that is not known");
  return AttentionBy::best;
}

std::unique_ptr<Compute> make_compute(device::Device& device, const Architecture& model, DType type,
                                      MicroBatchShape shape, AttentionBy attention_by) {
  const bool cuda = is_cuda(device.kind());
  require_type(type);
  require_shape(model.config, shape);
  if (cuda) return cuda::make_cuda_compute(model, type, shape, attention_by);
  return host::make_host_compute(device, model, type, shape);
}

KernelMemory kernel_memory(const Architecture& model, DType type, MicroBatchShape shape,
                           std::string_view device_kind, int compute_threads) {
  const bool cuda = is_cuda(device_kind);
  require_type(type);
  require_shape(model.config, shape);
  const int threads = compute_threads > 0 ? compute_threads : device::default_compute_threads();
  const auto compute =
      cuda ? cuda::make_cuda_compute(model, type, shape, AttentionBy::own)
           : host::make_host_compute(model, type, shape, static_cast<std::size_t>(threads));
  return {compute->workspace_bytes(), compute->intermediate_bytes()};
}

double attention_flops(const AttentionExtents& e, AttentionPass pass) {
  const double products = pass == AttentionPass::own_backward ? 5.0 : 2.0;
  const auto length = static_cast<double>(e.length);
  const double pairs = length * length / 2.0;
  return products * 2.0 * pairs * static_cast<double>(e.sequences * e.heads * e.head_size);
}

double measure_gemm_peak(device::Device& device, DType type, double seconds) {
  require_type(type);
  if (is_cuda(device.kind())) return cuda::measure_cuda_gemm_peak(device, type, seconds);
  return host::measure_host_gemm_peak(device, type, seconds);
}

}  // namespace ballast::model
