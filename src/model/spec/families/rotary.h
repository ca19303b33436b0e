#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "ballast/model/architecture.h"

#include "src/model/spec/rotary_angles.h"

namespace ballast::model {

/// Returns the frequencies of the pairs in a document of `tokens` tokens.
std::vector<double> frequencies_in_document(const Rotary& rotary, std::size_t tokens);

/// Rotary positions for whole heads without scaling. `theta`: the key with their base.
Rotary plain_rotary_positions(const ModelConfig& config, std::string_view theta,
                              const Refuse& refuse);

/// Additions to rotary_positions().
struct RotaryUse {
  /// The factor grows with the position (factor_at()) by rope_scaling's keys llama_4_scaling_beta
  /// and original_max_position_embeddings, if the first is given.
  bool grows = false;
  std::uint64_t width = 0;  ///< values of a head that may rotate; 0: head_dim
};

/// Rotary positions described by the keys rope_theta, rope_scaling, partial_rotary_factor (where
/// the family has them) and head_dim. Calls `refuse` for rope_scaling with an unknown type, an
/// unknown or missing key, or a bad value.
///
/// Types of rope_scaling, all as in Hugging Face's transformers: default; linear (positions divided
/// by the factor); dynamic (a base that grows with the length of the document; bloc97, "NTK-aware
/// scaled RoPE", 2023); llama3 (frequencies below a bound divided by the factor; Llama 3.1's model
/// card); yarn (Peng et al., "YaRN", 2023, section 3); longrope (other divisors of the frequencies
/// in long documents; Ding et al., "LongRoPE", 2024); proportional (the first pairs of a head turn,
/// with the frequencies of a whole head).
Rotary rotary_positions(const ModelConfig& config, const Refuse& refuse, const RotaryUse& use = {});

/// YaRN's factor of a softmax's scores beyond that of rotary positions, as in DeepSeek-V3: the
/// square of 0.1 mscale_all_dim ln(factor) + 1 for rope_scaling's keys; 1 without them.
double yarn_score_factor(const ModelConfig& config);

}  // namespace ballast::model
