#include <memory>
#include <string_view>

#include <fmt/format.h>

#include "ballast/core/error.h"

#include "src/model/compute_by.h"
#include "src/model/cuda/factories.h"
#include "src/model/cuda/ops.h"

namespace ballast::model::cuda {
namespace {

/// Elements of bf16 that are read at once.
constexpr std::uint64_t kPack = 8;
constexpr std::uint64_t kWidestHead = 256;

void require_packs(std::string_view key, std::uint64_t value) {
  if (value % kPack == 0) return;
  throw Error(ErrorCategory::config,
              fmt::format("{} is {}, but on device cuda it has to be a multiple of {}; use "
                          "ballast.device \"host\" or another {}",
                          key, value, kPack, key));
}

void require_numbers(const ModelConfig& config) {
  require_packs("model.hidden_size", config.hidden_size);
  require_packs("model.intermediate_size", config.intermediate_size);
  require_packs("model.hidden_size / model.num_heads", config.head_size());
  if (config.head_size() <= kWidestHead) return;
  throw Error(ErrorCategory::config,
              fmt::format("heads of {} values (model.hidden_size / model.num_heads), but device "
                          "cuda has attention for at most {}; raise model.num_heads or use "
                          "ballast.device \"host\"",
                          config.head_size(), kWidestHead));
}

}  // namespace

std::unique_ptr<Compute> make_cuda_compute(const Architecture& model, DType type,
                                           MicroBatchShape shape) {
  require_numbers(model.config);
  if (type == DType::f32) return std::make_unique<ComputeBy<Ops<float>>>(model, shape);
  return std::make_unique<ComputeBy<Ops<Bf16>>>(model, shape);
}

}  // namespace ballast::model::cuda
