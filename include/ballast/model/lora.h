#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/core/units.h"

namespace ballast::model {

/// Ends of the names of an adapter's tensors A and B, after the module's name.
inline constexpr std::string_view kFirstOfAdapter = ".lora_A.weight";
inline constexpr std::string_view kSecondOfAdapter = ".lora_B.weight";

/// Numbers for modules whose names match patterns, as rank_pattern and alpha_pattern of PEFT: a
/// pattern is a regular expression of Python's re for a module's name, or for its end after a dot.
/// The first pattern that matches counts.
class ModulePatterns {
 public:
  struct Row {
    std::string pattern;
    double value = 0.0;
    friend bool operator==(const Row&, const Row&) = default;
  };

  /// Returns false, and adds nothing, for an expression that std::regex reads differently or not.
  [[nodiscard]] bool add(std::string pattern, double value);
  /// Returns the number for a module ("model.layers.0.self_attn.q_proj").
  [[nodiscard]] std::optional<double> find(const std::string& module) const;
  /// Whether the pattern of a row matches one of the modules.
  [[nodiscard]] static bool matches_any(const Row& row, const std::vector<std::string>& modules);
  [[nodiscard]] const std::vector<Row>& rows() const { return rows_; }
  friend bool operator==(const ModulePatterns&, const ModulePatterns&) = default;

 private:
  std::vector<Row> rows_;
};

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
  // For modules that match. The scale s follows from the rank and alpha of the module.
  ModulePatterns rank_pattern = {};
  ModulePatterns alpha_pattern = {};
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

  // The rank, alpha and factor s of the adapter of a module.
  [[nodiscard]] std::uint64_t rank_of(const std::string& module) const;
  [[nodiscard]] double alpha_of(const std::string& module) const;
  [[nodiscard]] double scale_of(const std::string& module) const;
  /// Returns one line with every setting that changes the model's results.
  [[nodiscard]] std::string description() const;
};

/// The value of AdapterConfig::targets that selects all linear maps.
inline constexpr std::string_view kAllLinear = "all-linear";

/// Quantisation of a frozen base in bitsandbytes' format (QLoRA: Dettmers et al., arXiv
/// 2305.14314). Each block of consecutive elements of a flattened matrix shares a scale, the
/// largest magnitude. An element becomes the index of the nearest value (element / scale) in a
/// table of values in [-1, 1], the lower one on a tie.
struct Quantization {
  enum class Format : std::uint8_t {
    int8,  ///< one byte per element, from the 256 values of dynamic_map(); one scale per 256
           ///< elements
    nf4  ///< two elements per byte, the first in the high half, from nf4_values(); one scale per 64
         ///< elements
  };
  Format format = Format::nf4;
  /// Scales are quantised too (nf4 only; section 3 of the paper, "double quantization"): the mean
  /// is subtracted, and dynamic_map() encodes them in a byte each, with an fp32 scale per 256
  /// scales.
  bool double_scales = false;

  /// Elements per scale.
  [[nodiscard]] Elems block() const { return format == Format::nf4 ? 64 : 256; }
  /// A text that is equal for settings with the same results: "int8", "nf4", "nf4 with scales in 8
  /// bits".
  [[nodiscard]] std::string description() const;
  friend bool operator==(const Quantization&, const Quantization&) = default;
};

/// Offsets of the arrays of a quantised matrix of `elements`: codes, scales (fp32, or bytes if they
/// are quantised too), then fp32 scales of the scales and their mean. Each array begins at a
/// multiple of 64 bytes.
struct QuantizedArrays {
  QuantizedArrays(const Quantization& quantization, Elems elements);

  Elems elements;
  Elems scales_count;
  Elems nested_count;  ///< 0: scales are fp32
  Bytes scales;        ///< offsets in bytes; the codes begin at 0
  Bytes nested;
  Bytes mean;
  Bytes bytes;  ///< total size
};

/// Number of scales that share an fp32 scale.
inline constexpr Elems kNestedBlock = 256;

}  // namespace ballast::model
