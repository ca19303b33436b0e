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
/// With `dora`: y = g (W x + s B (A x)), with g = m / ||W + s B A|| for each output, where the norm
/// is taken over the inputs. The magnitudes m [out] are trained and initialised to the norms of W.
/// The backward pass treats the norms as constants. Source: Liu et al., "DoRA: Weight-decomposed
/// low-rank adaptation", arXiv 2402.09353, sections 4.1 and 4.3.
struct AdapterConfig {
  std::uint64_t rank = 8;
  double alpha = 8.0;
  double dropout = 0.0;  ///< dropout rate of the input of A during training
  /// s = alpha / sqrt(rank) instead of alpha / rank. Source: Kalajdzievski, "A rank stabilization
  /// scaling factor for fine-tuning with LoRA", 2023.
  bool rslora = false;
  bool dora = false;  ///< dropout must then be 0
  /// Names of linear maps or their last parts ("q_proj", "mlp.c_proj"). "all-linear" alone stands
  /// for every linear map of attention and of MLPs.
  std::vector<std::string> targets;
  /// Modules that are trained in full in addition to the adapters: their names, ends of names
  /// ("lm_head"), or patterns of tensor names.
  std::vector<std::string> modules_to_save;

  /// True if weights are stored as [in, out] (PEFT's fan_in_fan_out). Set by adapt().
  bool input_first = false;

  [[nodiscard]] double scale() const;  ///< the factor s
  /// Returns one line with every setting that changes the model's results.
  [[nodiscard]] std::string description() const;
};

/// The value of AdapterConfig::targets that selects all linear maps.
inline constexpr std::string_view kAllLinear = "all-linear";

}  // namespace ballast::model
