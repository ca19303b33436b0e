#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/model/architecture.h"
#include "ballast/model/family.h"

#include "src/model/description/layer_spec.h"
#include "src/model/description/rotary_angles.h"

namespace ballast::model {

/// The built-in families in the order of registration. The first is the default. A new family is
/// one file, which defines the function of this name, and one row here.
#define BALLAST_FAMILIES(X) \
  X(gpt2)                   \
  X(llama)                  \
  X(mistral)                \
  X(ministral3)             \
  X(qwen2)                  \
  X(qwen3)                  \
  X(smollm3)                \
  X(phi3)                   \
  X(olmo2)                  \
  X(olmo3)                  \
  X(granite)                \
  X(granite_swa)            \
  X(granitemoehybrid)       \
  X(arcee)                  \
  X(lfm2)                   \
  X(muse_glimmer)           \
  X(seed_oss)               \
  X(exaone4)                \
  X(hunyuan_v1_dense)       \
  X(ernie4_5)               \
  X(cohere2)                \
  X(gemma2)                 \
  X(gemma3)                 \
  X(gemma4)                 \
  X(gpt_neox)               \
  X(mixtral)                \
  X(qwen2_moe)              \
  X(qwen3_moe)              \
  X(olmoe)                  \
  X(gpt_oss)                \
  X(mellum)                 \
  X(ernie4_5_moe)           \
  X(granitemoe_swa)         \
  X(glm4_moe)               \
  X(minimax_m2)             \
  X(solar_open)             \
  X(hy_v3)                  \
  X(afmoe)                  \
  X(cohere2_moe)            \
  X(minimax_m3_vl_text)     \
  X(deepseek_v3)            \
  X(glm4_moe_lite)          \
  X(deepseek_v32)           \
  X(glm_moe_dsa)            \
  X(mistral4)               \
  X(qwen3_5)                \
  X(qwen3_5_moe)            \
  X(qwen3_next)             \
  X(olmo_hybrid)

namespace families {
#define BALLAST_DECLARE_FAMILY(name) std::unique_ptr<const Family> name();
BALLAST_FAMILIES(BALLAST_DECLARE_FAMILY)
#undef BALLAST_DECLARE_FAMILY
}  // namespace families

/// Rotary positions for whole heads without scaling. `theta`: the key with their base.
Rotary plain_rotary_positions(const ModelConfig& config, std::string_view theta,
                              const Refuse& refuse);

/// Additions to rotary_positions().
struct RotaryUse {
  /// The factor grows with the position (factor_at()) by rope_scaling's keys llama_4_scaling_beta
  /// and original_max_position_embeddings, if the first is given.
  bool grows = false;
  std::uint64_t width = 0;  ///< values of a head that may rotate; 0: head_dim
  /// Type dynamic may have the key alpha a, which multiplies the base by a^(d / (d - 2)) for heads
  /// of d values, whatever the length.
  bool alpha = false;
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

/// The value that a class of transformers assumes if config.json lacks the key.
struct CheckpointStandard {
  std::string name;
  text::Json value;
  bool nullable = false;  ///< whether null is a value, too
};
void set_standards(std::vector<CheckpointKey>& keys,
                   const std::vector<CheckpointStandard>& standards);
/// Returns the key for a detail, which has the same name in config.json and in the model section.
CheckpointKey checkpoint_key(const DetailKey& detail);

// For families with experts.

/// Returns the value of a key; calls `refuse` unless it is a whole number of at least `least`.
std::uint64_t whole_number(const ModelConfig& config, std::string_view key, std::uint64_t least,
                           const Refuse& refuse);
/// Returns the value of a checked key.
std::uint64_t whole_number(const ModelConfig& config, std::string_view key);
/// Checks the numbers of experts. `count`: the key for all experts of a layer.
void check_expert_counts(const ModelConfig& config, std::string_view count, const Refuse& refuse);
/// Adds the keys of all families with experts. `count`: the key for the number of experts.
std::vector<DetailKey> with_experts(std::vector<DetailKey> keys, std::string count,
                                    std::uint64_t per_token, double balance);
/// Checks the values of these keys.
void check_experts(const ModelConfig& config, std::string_view count, const Refuse& refuse);
/// Adds the keys of Qwen's families, in which only some layers have experts.
std::vector<DetailKey> with_sparse_layers(std::vector<DetailKey> keys, std::uint64_t per_token,
                                          std::uint64_t width);
void check_sparse_layers(const ModelConfig& config, const Refuse& refuse);
/// Returns whether a layer of these families has experts.
bool is_sparse(const ModelConfig& config, std::uint64_t index);
/// Checks the key mlp_layer_types, which is null or has a word for each layer.
void check_mlp_types(const ModelConfig& config, const Refuse& refuse);
/// Returns whether a layer has an MLP by mlp_layer_types or, without it, is one of the first
/// `standard` layers.
bool has_mlp(const ModelConfig& config, std::uint64_t index, std::uint64_t standard);
/// Keeps the keys that Hugging Face's configs have.
std::vector<CheckpointKey> keys_of_checkpoints(std::vector<CheckpointKey> keys);
/// Returns the experts of one layer, with the most common tensor names.
ExpertsSpec usual_experts(const ModelConfig& config, std::string_view count, std::uint64_t width);
/// Returns experts of families with the router mlp.router.gate, its correction mlp.expert_bias, and
/// a shared expert at `shared_prefix`. `factor`: the key of the factor of the weights.
ExpertsSpec corrected_experts(const ModelConfig& config, std::string_view factor,
                              std::string_view shared_prefix);
/// Returns the experts of one layer with the tensor names of Mixtral.
ExpertsSpec mixtral_experts(const ModelConfig& config, std::uint64_t width);
LayerSpec instead_of_mlp(LayerSpec layer, ExpertsSpec experts);
/// Checks that the key is a number above 0.
void check_factor(const ModelConfig& config, std::string_view key, const Refuse& refuse);
/// Checks the keys of experts that GLM-4.5 and DeepSeek-V3 have.
void check_sigmoid_experts(const ModelConfig& config, const Refuse& refuse);
/// Returns the experts of one layer that these keys describe.
ExpertsSpec sigmoid_experts(const ModelConfig& config);

}  // namespace ballast::model
