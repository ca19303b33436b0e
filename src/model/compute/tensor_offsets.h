#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/core/random.h"
#include "ballast/model/architecture.h"

namespace ballast::model {

/// Offsets of a norm's tensors in a block, in elements.
struct NormAt {
  Elems weight = 0;
  std::optional<Elems> bias;
  float offset = 0.0F;   ///< see Norm
  float epsilon = 0.0F;  ///< see Norm
  bool centred = false;  ///< see Norm
  bool plain = false;    ///< has no weights
};

/// Offsets of an adapter's tensors in a block, in elements: A [rank, in], B [out, rank].
struct AdapterAt {
  Elems a = 0;
  Elems b = 0;
  std::size_t rank = 0;
  float scale = 1.0F;  ///< the factor s
  std::size_t out = 0;
  std::size_t column = 0;    ///< first output of the adapter among those of the map
  std::size_t number = 0;    ///< index among the adapters of all maps with the same input
  std::uint64_t stream = 0;  ///< stream of its random numbers
  std::optional<Elems> magnitudes = std::nullopt;  ///< [out], with DoRA
};

/// Offsets of a linear map's tensors in a block, in elements, and its extents.
struct LinearAt {
  Elems weight = 0;
  std::optional<Elems> bias;
  std::size_t in = 0;
  std::size_t out = 0;
  bool flipped = false;  ///< see Linear
  bool frozen = false;   ///< whether its weight is frozen
  std::vector<AdapterAt> adapters = {};
};

inline std::optional<Elems> find_bias(const BlockSpec& block, std::string_view name) {
  const TensorSpec* const found = block.find(std::string(name) + ".bias");
  return found == nullptr ? std::nullopt : std::optional(found->offset);
}

/// Finds NAME.weight and, if the block has it, NAME.bias: a LayerNorm has a bias, an RMSNorm does
/// not.
inline NormAt find_norm(const BlockSpec& block, const NormSpec& spec) {
  return {.weight = block.tensor(spec.name + ".weight").offset,
          .bias = find_bias(block, spec.name),
          .offset = spec.offset,
          .epsilon = static_cast<float>(spec.epsilon),
          .centred = spec.layer_norm};
}

/// Finds NAME.lora_A.weight, NAME.lora_B.weight and NAME.lora_magnitude_vector, if present.
inline std::vector<AdapterAt> find_adapters(const BlockSpec& block, std::string_view name) {
  const TensorSpec* const a = block.find(std::string(name) + ".lora_A.weight");
  if (a == nullptr) return {};
  const TensorSpec& b = block.tensor(std::string(name) + ".lora_B.weight");
  const TensorSpec* const m = block.find(std::string(name) + ".lora_magnitude_vector");
  return {{a->offset, b.offset, a->shape[0], static_cast<float>(a->adapter_scale), b.shape[0], 0, 0,
           fnv1a(a->name), m == nullptr ? std::nullopt : std::optional(m->offset)}};
}

/// Finds NAME.weight [out, in] with its adapter and, if the block has it, NAME.bias [out].
inline LinearAt find_linear(const BlockSpec& block, std::string_view name) {
  const TensorSpec& weight = block.tensor(std::string(name) + ".weight");
  return {weight.offset, find_bias(block, name), weight.shape[1],           weight.shape[0],
          true,          weight.frozen,          find_adapters(block, name)};
}

/// Like find_linear(), for gpt2's Conv1D, whose weight is [in, out].
inline LinearAt find_conv1d(const BlockSpec& block, std::string_view name) {
  const TensorSpec& weight = block.tensor(std::string(name) + ".weight");
  return {weight.offset, find_bias(block, name), weight.shape[0],           weight.shape[1],
          false,         weight.frozen,          find_adapters(block, name)};
}

/// Returns `first`, the map NAME, or all ranges of a fused map that a tile has as separate tensors
/// NAME.weight, in their order, each with its NAME.bias if the block has it.
inline std::vector<LinearAt> find_ranges(const BlockSpec& block, std::string_view name,
                                         const LinearAt& first) {
  const std::string full = block.prefix + std::string(name);
  std::vector<LinearAt> ranges;
  std::size_t biases = 0;
  for (const TensorSpec& tensor : block.tensors) {
    if (tensor.name != full + ".weight") continue;
    ranges.push_back(first);
    ranges.back().weight = tensor.offset;
    ranges.back().out = tensor.shape[first.flipped ? 0 : 1];
  }
  for (const TensorSpec& tensor : block.tensors) {
    if (tensor.name == full + ".bias") ranges.at(biases++).bias = tensor.offset;
  }
  return ranges;
}

/// Finds the tensor NAME [out, in] of ExpertsSpec::stacked or fused, and NAME_bias [out], if there
/// is one.
inline LinearAt find_stacked(const BlockSpec& block, std::string_view name) {
  const TensorSpec& weight = block.tensor(name);
  const TensorSpec* const bias = block.find(std::string(name) + "_bias");
  return {weight.offset,
          bias == nullptr ? std::nullopt : std::optional(bias->offset),
          weight.shape[1],
          weight.shape[0],
          true,
          weight.frozen};
}

/// Joins maps with the same input that are contiguous, have no bias and are all trained or all
/// frozen.
inline std::vector<LinearAt> joined(const std::vector<LinearAt>& maps) {
  std::vector<LinearAt> parts;
  for (const LinearAt& next : maps) {
    if (!parts.empty() && next.flipped && !next.bias && !parts.back().bias &&
        parts.back().frozen == next.frozen &&
        parts.back().weight + parts.back().out * next.in == next.weight) {
      for (AdapterAt adapter : next.adapters) {
        adapter.column = parts.back().out;
        parts.back().adapters.push_back(adapter);
      }
      parts.back().out += next.out;
    } else {
      parts.push_back(next);
    }
  }
  return parts;
}

/// Numbers the adapters of maps with the same input.
inline void number_adapters(std::vector<LinearAt>& maps) {
  std::size_t number = 0;
  for (LinearAt& map : maps) {
    for (AdapterAt& adapter : map.adapters) adapter.number = number++;
  }
}

}  // namespace ballast::model
