#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/model/architecture.h"
#include "ballast/model/family.h"
#include "ballast/model/kernels.h"

#include "src/model/description/rotary_angles.h"

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

/// Experts instead of an MLP. The router sends each token to some experts. Their results, weighted
/// by the router's probabilities, are added to the residual stream.
struct ExpertsSpec {
  std::uint64_t count = 0;      ///< 0: the layer has an MLP
  std::uint64_t per_token = 0;  ///< experts per token
  std::uint64_t width = 0;      ///< width of an expert's MLP
  bool renormalises = false;    ///< the weights of a token's experts are divided by their sum
  bool sigmoid = false;         ///< scores are sigmoids of the logits; false: their softmax
  std::string correction;       ///< buffer [count], added to scores for the choice; "": none
  std::uint64_t groups = 1;     ///< see RouterShape
  std::uint64_t kept_groups = 1;
  double factor = 1.0;  ///< for the weights of a token's experts
  std::string router;   ///< the map [count, H]
  bool router_bias = false;
  /// Common prefix of an expert's maps: PREFIX + number + "." + name.
  std::string prefix;
  std::string gate;
  std::string up;
  std::string down;
  /// Tensors PREFIX + name hold the maps of all experts: `gate` [count, H, 2 width] with gate and
  /// up in alternating columns, `down` [count, width, H]. Each has a NAME_bias.
  bool stacked = false;
  /// Tensors PREFIX + name hold the maps of all experts, without biases: `gate_up_proj`
  /// [count, 2 width, H] with the rows of gate before those of up, `down` [count, H, width].
  bool fused = false;
  float limit = 0.0F;  ///< see Gating
  float slope = 1.0F;
  /// The expert for all tokens: its maps have their own prefix, and the sigmoid of a map [1, H] is
  /// its weight. Without that map, its weight is 1.
  std::uint64_t shared_width = 0;  ///< 0: none
  std::string shared_prefix;
  std::string shared_gate;

  [[nodiscard]] std::string of_expert(std::uint64_t number, const std::string& name) const {
    return stacked || fused ? prefix + name : prefix + std::to_string(number) + "." + name;
  }

  friend bool operator==(const ExpertsSpec&, const ExpertsSpec&) = default;
};

/// The first tensor of ExpertsSpec::fused.
inline constexpr const char* kFusedGate = "gate_up_proj";
/// Experts in addition to the MLP of a layer, in the block of the layer. With x, the residual
/// stream after attention, the router reads x / rms(x) * scale / sqrt(H). The weights of a token's
/// experts are divided by their sum. compute/layer_experts.h has the formula.
struct LayerExpertsSpec {
  std::uint64_t count = 0;  ///< 0: none
  std::uint64_t per_token = 0;
  std::uint64_t width = 0;     ///< width of an expert's MLP
  std::string router;          ///< a map [count, H]
  std::string router_scale;    ///< [H]
  std::string factors;         ///< [count], factors of the experts' results
  std::string in;              ///< [count, 2 width, H], rows of gate, then of up
  std::string out;             ///< [count, H, width]
  std::string norm_before;     ///< norm of x before the experts
  std::string norm_after;      ///< norm of the experts' sum
  std::string norm_after_mlp;  ///< norm of the MLP's result before both are added

  friend bool operator==(const LayerExpertsSpec&, const LayerExpertsSpec&) = default;
};
/// Returns whether the tensor has the maps of all experts of a LayerExpertsSpec.
inline bool is_layer_experts(const TensorSpec& tensor) {
  return tensor.shape.size() == 3 && tensor.name.find(".experts.") != std::string::npos;
}
/// Returns whether the tensor is the router of a LayerExpertsSpec, which is neither adapted nor
/// quantised.
inline bool is_layer_router(const TensorSpec& tensor) {
  return tensor.name.ends_with(".router.proj.weight");
}

/// Multi-head latent attention: keys and values, and possibly queries, are maps of low rank with a
/// norm between two matrices. A head of queries or keys has `plain` values, then `rotating` ones;
/// the rotating keys are the same for all heads. DecoderSpec::qkv is the map of queries, of the
/// layer's input or of the normed result of query_down. Source: DeepSeek-AI, "DeepSeek-V2", 2024,
/// section 2.1.
struct LatentSpec {
  std::uint64_t rank = 0;        ///< rank of keys and values; 0: other attention
  std::uint64_t query_rank = 0;  ///< 0: queries are one map
  std::uint64_t plain = 0;
  std::uint64_t rotating = 0;
  std::uint64_t values = 0;  ///< width of a head of values, at most plain + rotating
  std::string query_down;    ///< [query_rank, H]
  std::string query_norm;
  std::string down;  ///< [rank | rotating, H]
  std::string norm;
  std::string up;        ///< [heads x (plain | values), rank]
  bool bias = false;     ///< whether query_down and down have biases
  double epsilon = 0.0;  ///< added to the mean squares in both norms

  friend bool operator==(const LatentSpec&, const LatentSpec&) = default;
};

/// Gated delta net instead of attention: a causal convolution over the channels of queries, keys
/// and values, a recurrence per head (host/delta_rule.h), and a gated norm. DecoderSpec::qkv are
/// maps of the layer's input whose outputs are, side by side, queries, keys, values, gates, `b` and
/// `a`, and DecoderSpec::attention_out is the last map. If `by_key_head`, there are two maps: one
/// for the first four of these, for one head of keys after the other, and one for `b` and `a`.
/// Source: Yang et al., "Gated Delta Networks", 2025.
struct DeltaSpec {
  std::uint64_t key_heads = 0;    ///< heads of queries and of keys; 0: attention
  std::uint64_t value_heads = 0;  ///< a multiple of key_heads
  std::uint64_t key_width = 0;
  std::uint64_t value_width = 0;
  std::uint64_t taps = 0;   ///< width of the convolution
  std::string convolution;  ///< [channels, 1, taps]
  std::string decay;        ///< [value_heads], the logarithms of the decay rates
  std::string shift;        ///< [value_heads]
  std::string norm;         ///< [value_width]
  bool by_key_head = false;

  [[nodiscard]] std::uint64_t keys() const { return key_heads * key_width; }
  [[nodiscard]] std::uint64_t values() const { return value_heads * value_width; }
  [[nodiscard]] std::uint64_t channels() const { return 2 * keys() + values(); }

  friend bool operator==(const DeltaSpec&, const DeltaSpec&) = default;
};

/// Inputs of a layer besides the residual stream. For a token with the embedding e (scaled), layer
/// l gets p = (n(P e / sqrt(H))_l + sqrt(width) T_l[token]) / sqrt(2). After its MLP it computes x
/// + norm(out(gelu(gate(x)) * p)). P and n belong to the block of the first layer, and each layer
/// has its columns of the table T, in a block of BlockContent::layer_embedding. Source: the class
/// Gemma4TextModel of transformers.
struct LayerEmbeddingSpec {
  std::uint64_t width = 0;       ///< 0: none
  std::uint64_t vocabulary = 0;  ///< rows of the table
  // Names with their prefix.
  std::string table;            ///< [vocabulary, layers x width]
  std::string projection;       ///< P [layers x width, H]
  std::string projection_norm;  ///< n [width]
  // Names in the layer.
  std::string gate;  ///< [width, H]
  std::string out;   ///< [H, width]
  std::string norm;  ///< [H]

  friend bool operator==(const LayerEmbeddingSpec&, const LayerEmbeddingSpec&) = default;
};

/// One layer of a decoder: residual stream -> attention -> residual stream -> MLP -> residual
/// stream. Tensors are named without the layer's prefix and without ".weight"; an empty name means
/// no such tensor.
struct DecoderSpec {
  bool layer_norm = false;   ///< norms subtract the mean and have a bias; false: RMSNorm
  float norm_offset = 0.0F;  ///< RMSNorms multiply by this offset plus their weight
  std::string norm_before_attention;
  std::string norm_after_attention;  ///< applied before its result is added to the residual stream
  std::string norm_before_mlp;
  std::string norm_after_mlp;
  /// The MLP reads the input of the layer instead of the residual stream after attention.
  bool parallel = false;

  /// Queries, keys and values: one map with rows in that order, or three maps. Two maps: the
  /// results of the second one are keys, before their norm and rotation, and values.
  std::vector<std::string> qkv;
  /// Keys and values are those of the layer keys_of(), after norms and rotation. `qkv` is the map
  /// of queries.
  bool reads_keys = false;
  LatentSpec latent;       ///< replaces three maps
  std::string query_norm;  ///< RMSNorms before rotary positions
  std::string key_norm;
  bool norms_whole_rows = false;  ///< true: over all heads together; false: per head
  bool norms_values = false;      ///< values have an RMSNorm per head whose weights are 1
  bool rotates = true;            ///< false: attention without rotary positions
  std::size_t rotary = 0;         ///< index into rotaries_of()
  std::size_t query_rotary = 0;   ///< that of queries, if it is not 0; else `rotary`
  /// Index into rotaries_of() of one without frequencies whose factor multiplies whole queries; 0:
  /// none.
  std::size_t query_growth = 0;
  std::uint64_t window = 0;  ///< attended tokens, including its own; 0: all preceding
  std::string sinks;         ///< a tensor [heads] (AttentionSinks); "": none
  std::string attention_out;
  /// The map of queries also makes a gate per value of the results of attention, which multiply
  /// these by its sigmoid. In files its rows are queries and gates of each head. Needs norms of
  /// queries and keys.
  bool output_gate = false;
  DeltaSpec delta;

  std::string result_scale;  ///< a buffer [1] that multiplies the layer's result; "": none

  /// True: gate and up, or one map with rows in that order. False: one map and its activation.
  bool gated = true;
  Activation activation = Activation::silu;
  std::vector<std::string> mlp_in;
  std::string mlp_out;
  std::uint64_t mlp_width = 0;  ///< 0: intermediate_size

  ExpertsSpec experts;  ///< replace mlp_in and mlp_out
  LayerExpertsSpec layer_experts;
  LayerEmbeddingSpec inputs;

  bool conv1d = false;           ///< weights of linear maps are [in, out]; false: [out, in]
  bool interleaved_qkv = false;  ///< TensorSpec::stored of a joined map: grouped by head
  bool qkv_bias = false;
  bool attention_out_bias = false;
  bool mlp_bias = false;

  /// Factor for the initial standard deviation of attention_out and mlp_out.
  double residual_factor = 1.0;

  friend bool operator==(const DecoderSpec&, const DecoderSpec&) = default;
};

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

/// A family whose layers are described by a DecoderSpec. Tensors are in the order of the data flow.
/// compute/decoder_layer.h has the forward and backward pass.
class DecoderFamily : public Family {
 public:
  /// Describes layer `index` of a complete config.
  [[nodiscard]] virtual DecoderSpec decoder(const ModelConfig& config,
                                            std::uint64_t index) const = 0;
  [[nodiscard]] BlockSpec layer(const ModelConfig& config, std::uint64_t index) const final;
  [[nodiscard]] std::vector<BlockSpec> blocks_of_layer(const ModelConfig& config,
                                                       std::uint64_t index) const final;
  [[nodiscard]] std::size_t count_blocks_of_layer(const ModelConfig& config,
                                                  std::uint64_t index) const final;
  [[nodiscard]] std::uint64_t experts_of_layer(const ModelConfig& config,
                                               std::uint64_t index) const final;
  [[nodiscard]] std::string obstacle_to_tiles(const ModelConfig& config,
                                              std::uint64_t places) const final;
  [[nodiscard]] std::vector<BlockSpec> layer_tiles(const ModelConfig& config,
                                                   std::uint64_t index) const final;
  /// Width of a head of queries and keys, if the family's own keys give it; 0: head_dim.
  [[nodiscard]] virtual std::uint64_t head_width(const ModelConfig& /*config*/) const { return 0; }
  /// Rotary positions of the layers (see DecoderSpec::rotary); empty if no layer rotates.
  [[nodiscard]] virtual std::vector<Rotary> rotaries(const ModelConfig& /*config*/,
                                                     const Refuse& /*refuse*/) const {
    return {};
  }
  /// Returns rotaries() of a complete config. Throws Error(config).
  [[nodiscard]] std::vector<Rotary> rotaries_of(const ModelConfig& config) const;
  [[nodiscard]] bool depends_on_documents(const ModelConfig& config,
                                          std::uint64_t length) const final;

 protected:
  /// Common prefix of the tensors' names of a layer.
  [[nodiscard]] virtual std::string prefix(std::uint64_t index) const = 0;

 private:
  [[nodiscard]] std::vector<BlockSpec> expert_blocks(const ModelConfig& config, std::uint64_t index,
                                                     const DecoderSpec& spec) const;
};

/// Returns the family of `config`. Throws Error(state) if it is not a DecoderFamily.
const DecoderFamily& decoder_family(const ModelConfig& config);

}  // namespace ballast::model
