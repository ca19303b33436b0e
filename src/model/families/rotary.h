#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "ballast/model/architecture.h"

namespace ballast::model {

/// Rotary positions: the pairs (x[i], x[i + n]) of the first 2n values of a head rotate by position
/// * frequencies[i]. Source: Su et al., "RoFormer", 2021, section 3.2.2.
struct Rotary {
  std::vector<double> frequencies;  ///< n
  double factor = 1.0;              ///< of cosines and sines

  friend bool operator==(const Rotary&, const Rotary&) = default;
};

/// Rotary positions of whole heads without scaling, with the base that the key `theta` names.
Rotary plain_rotary_positions(const ModelConfig& config, std::string_view theta,
                              const Refuse& refuse);

/// The rotary positions that the keys rope_theta, rope_scaling, partial_rotary_factor (where the
/// family has them) and head_dim describe, for sequences of `length` tokens. `refuse`
/// gets rope_scaling with an unknown type, an unknown or missing key of that type, or a bad value.
///
/// Types of rope_scaling, all as in Hugging Face's transformers: default; linear (positions divided
/// by the factor); dynamic (a base that grows with the length; bloc97, "NTK-aware scaled RoPE",
/// 2023); llama3 (frequencies below a bound divided by the factor; Llama 3.1's model card); yarn
/// (Peng et al., "YaRN", 2023, section 3); longrope (Ding et al., "LongRoPE", 2024).
Rotary rotary_positions(const ModelConfig& config, std::uint64_t length, const Refuse& refuse);

}  // namespace ballast::model
