#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace ballast::model {

/// Low-rank adapters of frozen linear maps: y = W x + s B (A x), with A [rank, in] and B [out,
/// rank] trained. Source: Hu et al., "LoRA: Low-rank adaptation of large language models", ICLR
/// 2022, section 4.1. Names and defaults are those of PEFT's LoraConfig.
///
/// With `dora`: y = g (W x + s B (A x)), with g = m / ||W + s B A|| for each output, the norm over
/// its inputs. The magnitudes m [out] are trained and begin as the norms of W; the backward pass
/// takes the norms as constants. Source: Liu et al., "DoRA: Weight-decomposed low-rank adaptation",
/// arXiv 2402.09353, sections 4.1 and 4.3.
struct AdapterConfig {
  std::uint64_t rank = 8;
  double alpha = 8.0;
  double dropout = 0.0;  ///< of what A reads, in training
  /// s = alpha / sqrt(rank) instead of alpha / rank. Source: Kalajdzievski, "A rank stabilization
  /// scaling factor for fine-tuning with LoRA", 2023.
  bool rslora = false;
  bool dora = false;  ///< without dropout
  /// Names of maps or their last parts ("q_proj", "mlp.c_proj"), or "all-linear" alone: every map
  /// of attention and of MLPs.
  std::vector<std::string> targets;
  /// What is trained in full besides: names of modules or their ends ("lm_head"), or patterns of
  /// names of tensors.
  std::vector<std::string> modules_to_save;

  /// Weights of maps are [in, out] (PEFT's fan_in_fan_out); set by adapt().
  bool input_first = false;

  [[nodiscard]] double scale() const;  ///< s
  /// One line with all that changes what the model computes.
  [[nodiscard]] std::string description() const;
};

/// AdapterConfig::targets for all maps.
inline constexpr std::string_view kAllLinear = "all-linear";

}  // namespace ballast::model
