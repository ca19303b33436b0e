#pragma once

#include <cstddef>
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

/// Rotary positions described by the keys rope_theta, rope_scaling, partial_rotary_factor (where
/// the family has them) and head_dim. Calls `refuse` for rope_scaling with an unknown type, an
/// unknown or missing key, or a bad value.
///
/// Types of rope_scaling, all as in Hugging Face's transformers: default; linear (positions divided
/// by the factor); dynamic (a base that grows with the length of the document; bloc97, "NTK-aware
/// scaled RoPE", 2023); llama3 (frequencies below a bound divided by the factor; Llama 3.1's model
/// card); yarn (Peng et al., "YaRN", 2023, section 3); longrope (other divisors of the frequencies
/// in long documents; Ding et al., "LongRoPE", 2024).
///
/// `grows`: the factor grows with the position (factor_at()) by rope_scaling's keys
/// llama_4_scaling_beta and original_max_position_embeddings, if the first is given.
Rotary rotary_positions(const ModelConfig& config, const Refuse& refuse, bool grows = false);

}  // namespace ballast::model
