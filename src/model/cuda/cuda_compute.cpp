#include <algorithm>
#include <memory>
#include <string>
#include <string_view>

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/model/cuda_libraries.h"
#include "ballast/model/family.h"

#include "src/device/cuda/libraries.h"
#include "src/device/cuda/runtime.h"
#include "src/model/compute/factories.h"
#include "src/model/cuda/attention/attention.h"
#include "src/model/cuda/mixers/mixers.h"
#include "src/model/cuda/ops.h"
#include "src/model/description/layer_rules.h"

namespace ballast::model::cuda {

namespace {

/// bf16 elements per memory access.
constexpr std::uint64_t kPack = 8;
/// On GPUs of compute capability 7.5, a block of attention_fma.cu has 64 KiB of shared memory.
constexpr std::uint64_t kWidestHeadOnOldest = 320;

/// Width of the heads of a layer, and the key that sets it.
struct Heads {
  std::string key;
  std::uint64_t width = 0;
};
Heads heads_of(const ModelConfig& config, std::uint64_t layer) {
  const std::uint64_t width = heads_of(family(config.family).layer(config, layer), config).head_dim;
  return {width == config.head_dim ? "model.head_dim" : "model.global_head_dim", width};
}

void require_packs(std::string_view key, std::uint64_t value) {
  if (value % kPack == 0) return;
  throw Error(ErrorCategory::config,
              fmt::format("{} is {}, but device cuda needs a multiple of {}; change {} or set "
                          "ballast.device to \"host\"",
                          key, value, kPack, key));
}

/// Checks the width of a head.
void require_width(std::string_view key, std::uint64_t width, std::uint64_t most) {
  require_packs(key, width);
  if (width <= most) return;
  throw Error(ErrorCategory::config,
              fmt::format("{} is {}, but device cuda supports at most {}; lower it or set "
                          "ballast.device to \"host\"",
                          key, width, most));
}

/// Checks the widths of heads in all layers.
void require_heads(const ModelConfig& config) {
  for (std::uint64_t layer = 0; layer < config.num_layers; ++layer) {
    const auto [key, width] = heads_of(config, layer);
    require_width(key, width, kWidestHead);
  }
}

void require_numbers(const ModelConfig& config) {
  require_packs("model.hidden_size_per_layer_input", layer_input_width(layers_of(config)));
  require_packs("model.hidden_size", config.hidden_size);
  require_packs("model.intermediate_size", config.intermediate_size);
  for (const LayerSpec& layer : layers_of(config)) {
    if (const auto* const mlp = layer.find<MlpSpec>()) {
      require_packs("the width of the MLP", mlp->width);
    }
  }
  for (const char* const key :
       {"moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank",
        "qk_rope_head_dim", "v_head_dim", "linear_num_value_heads"}) {
    if (!config.details.contains(key)) continue;
    require_packs(fmt::format("model.{}", key), config.detail(key).whole().value_or(0));
  }
  for (const char* const key : {"linear_key_head_dim", "linear_value_head_dim"}) {
    if (!config.details.contains(key)) continue;
    require_width(fmt::format("model.{}", key), config.detail(key).whole().value_or(0),
                  kWidestDeltaHead);
  }
  require_heads(config);
}

/// Checks the heads of values of a gated delta net in one tile.
void require_heads_of_tile(const Architecture& model) {
  const std::uint64_t tiles = model.config.layer_tiles;
  for (const LayerSpec& layer : *model.layers) {
    const LayerSpec tile = widest_tile(layer, tiles);
    const auto* const delta = tile.find<DeltaSpec>();
    if (tiles == 1 || delta == nullptr || delta->value_heads % kPack == 0) continue;
    throw Error(
        ErrorCategory::config,
        fmt::format("model.layer_tiles {} gives a tile {} of {} heads of values "
                    "(linear_num_value_heads), but device cuda needs a multiple of {}; "
                    "lower it or set ballast.device to \"host\"",
                    tiles, delta->value_heads, layer.find<DeltaSpec>()->value_heads, kPack));
  }
}

void require_cudnn(const Architecture& model, DType type) {
  const bool capped = std::ranges::any_of(*model.layers, [](const LayerSpec& layer) {
    const auto* const attention = layer.find<AttentionSpec>();
    return attention != nullptr && attention->cap > 0.0;
  });
  if (capped) {
    throw Error(ErrorCategory::config,
                fmt::format("ballast.attention is \"cudnn\", which has no soft caps of scores, but "
                            "model.family {} has; set ballast.attention to \"own\"",
                            model.config.family));
  }
  if (type != DType::bf16) {
    throw Error(ErrorCategory::config,
                "ballast.attention is \"cudnn\", which supports bf16 only; enable bf16 or "
                "set ballast.attention to \"own\"");
  }
  if (const std::string_view refusal = fused_attention_refusal(); !refusal.empty()) {
    throw Error(ErrorCategory::device,
                fmt::format("ballast.attention is \"cudnn\", but {}", refusal));
  }
}

}  // namespace

void require_gpu_for(const ModelConfig& config) {
  int ordinal = 0;
  device::check_cuda(cudaGetDevice(&ordinal), "querying the current CUDA device");
  cudaDeviceProp gpu = {};
  device::check_cuda(cudaGetDeviceProperties(&gpu, ordinal), "querying the current CUDA device");
  for (std::uint64_t layer = 0; gpu.major < 8 && layer < config.num_layers; ++layer) {
    const auto [key, width] = heads_of(config, layer);
    if (width <= kWidestHeadOnOldest) continue;
    throw Error(ErrorCategory::config,
                fmt::format("{} is {}, but {} (compute capability {}.{}) supports at most {}; use "
                            "a GPU of 8.0 or newer, or set ballast.device to \"host\"",
                            key, width, gpu.name, gpu.major, gpu.minor, kWidestHeadOnOldest));
  }
}

std::unique_ptr<Compute> make_cuda_compute(const Architecture& model, DType type,
                                           MicroBatchShape shape, const KernelOptions& options) {
  require_numbers(model.config);
  require_heads_of_tile(model);
  if (options.attention == AttentionBackend::cudnn) require_cudnn(model, type);
  return with_training_type(type, [&](auto value) -> std::unique_ptr<Compute> {
    return make_device_compute(model, shape,
                               make_ops<decltype(value)>(kernel_extents(model, shape), options));
  });
}

}  // namespace ballast::model::cuda

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
