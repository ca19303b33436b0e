#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/model/architecture.h"
#include "ballast/model/family.h"

#include "src/model/description/families/decoder.h"

namespace ballast::model {

/// Coefficients of the router losses.
struct RouterLosses {
  double balance = 0.0;  ///< coefficient of the load-balancing loss
  double z = 0.0;        ///< coefficient of the z-loss
};
/// Returns the coefficients in the config; zeros for families without experts.
RouterLosses router_losses(const ModelConfig& config);

/// Width of the widest sum over rows in experts, their router, and maps of low rank (biases, norms,
/// logits); 0 for a family without a DecoderSpec.
std::uint64_t widest_of_specs(const ModelConfig& config);

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
/// Keeps the keys that Hugging Face's configs have.
std::vector<CheckpointKey> keys_of_checkpoints(std::vector<CheckpointKey> keys);
/// Returns the experts of one layer, with the most common tensor names.
ExpertsSpec usual_experts(const ModelConfig& config, std::string_view count, std::uint64_t width);
/// Returns the experts of one layer with the tensor names of Mixtral.
ExpertsSpec mixtral_experts(const ModelConfig& config, std::uint64_t width);
DecoderSpec instead_of_mlp(DecoderSpec spec, ExpertsSpec experts);
/// Checks the keys of experts that GLM-4.5 and DeepSeek-V3 have.
void check_sigmoid_experts(const ModelConfig& config, const Refuse& refuse);
/// Returns the experts of one layer that these keys describe.
ExpertsSpec sigmoid_experts(const ModelConfig& config);
/// Returns the families whose routers use sigmoids.
std::vector<std::unique_ptr<const Family>> families_with_sigmoid_routers();

/// The built-in families whose layers have experts.
std::vector<std::unique_ptr<const Family>> families_with_experts();

/// Returns the families with latent attention (LatentSpec).
std::vector<std::unique_ptr<const Family>> families_with_latent_attention();

/// Returns the families with gated delta nets (DeltaSpec).
std::vector<std::unique_ptr<const Family>> families_with_delta_nets();

/// Returns whether layers of such models have gated delta nets, which need whole sequences on one
/// rank.
bool has_delta_nets(const ModelConfig& config);

/// Names of the families that have the key of the model section, in order of registration.
std::vector<std::string> families_with_key(std::string_view key);

/// Returns those of `keys`, keys of the model section, whose values change nothing that the model
/// computes and no limit that it sets, whatever they are, because other keys switch them off.
/// `given`: a valid config before complete(). A key is tried with other values; it has an effect if
/// one of them makes another model, or if none of them is valid.
std::vector<std::string> unused_keys(const ModelConfig& given, std::span<const std::string> keys);

}  // namespace ballast::model
