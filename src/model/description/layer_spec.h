#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "ballast/core/error.h"
#include "ballast/model/architecture.h"
#include "ballast/model/block_layout.h"
#include "ballast/model/family.h"
#include "ballast/model/kernels.h"

// The description of a layer as a list of sublayers, each one addition to the residual stream. Data
// only. Tensors are named without the layer's prefix and without ".weight"; an empty name means no
// such tensor.

namespace ballast::model {

/// A linear map NAME.weight, perhaps with NAME.bias.
struct MapSpec {
  std::string name;
  bool bias = false;
  double factor = 1.0;       ///< multiplies its results, also those of adapters
  double init_factor = 1.0;  ///< multiplies the standard deviation of its first values

  friend bool operator==(const MapSpec&, const MapSpec&) = default;
};

/// Maps to queries, keys and values of heads. Three maps, or one with rows in that order. Two: the
/// results of the second one are keys, before their norm and rotation, and values. One, if
/// AttentionSpec::keys_of is another layer: that of queries.
struct HeadMaps {
  std::vector<MapSpec> maps;
  std::optional<NormSpec> query_norm;  ///< RMSNorms
  std::optional<NormSpec> key_norm;
  std::optional<NormSpec> value_norm;  ///< per head, without weights; needs key_norm
  bool whole_rows = false;             ///< norms over all heads together; false: per head
  bool rotates_first = false;          ///< norms are after rotary positions; false: before
  /// In files, the rows of the only map are queries, keys and values of each head.
  bool interleaved = false;
  /// The map of queries also makes a gate per value of the results of attention, which multiply
  /// these by its sigmoid. In files its rows are queries and gates of each head. Needs norms of
  /// queries and keys.
  bool output_gate = false;
  MapSpec gate;  ///< a separate map for these gates; "": none. Needs the norms, too

  friend bool operator==(const HeadMaps&, const HeadMaps&) = default;
};

/// Multi-head latent attention: keys and values, and possibly queries, are maps of low rank with a
/// norm between two matrices. A head of queries or keys has `plain` values, then `rotating` ones;
/// the rotating keys are the same for all heads. Source: DeepSeek-AI, "DeepSeek-V2", 2024,
/// section 2.1.
struct LatentMaps {
  std::uint64_t query_rank = 0;  ///< 0: queries are one map
  std::uint64_t rank = 0;        ///< rank of keys and values
  std::uint64_t plain = 0;
  std::uint64_t rotating = 0;
  std::uint64_t values = 0;  ///< width of a head of values, at most plain + rotating
  MapSpec query_down;        ///< [query_rank, H]
  NormSpec query_norm;
  MapSpec query;  ///< reads the layer's input, or the normed result of query_down
  MapSpec down;   ///< [rank | rotating, H]
  NormSpec norm;
  MapSpec up;  ///< [heads x (plain | values), rank]

  friend bool operator==(const LatentMaps&, const LatentMaps&) = default;
};

/// Indices into Family::rotaries().
struct RotarySpec {
  std::size_t keys = 0;
  std::size_t queries = 0;
  /// One without frequencies whose factor multiplies whole queries; 0: none.
  std::size_t growth = 0;

  friend bool operator==(const RotarySpec&, const RotarySpec&) = default;
};

struct AttentionSpec {
  HeadExtents heads;
  std::variant<HeadMaps, LatentMaps> maps;
  std::optional<RotarySpec> rotary;  ///< none: no positions
  std::uint64_t window = 0;          ///< attended tokens, including its own; 0: all preceding
  double scale = 0.0;                ///< factor of scores; 0: 1 / sqrt(head_dim)
  double cap = 0.0;                  ///< soft cap of scores, see AttentionShape::cap; 0: none
  std::string sinks;                 ///< a tensor [heads] (AttentionSinks)
  /// The earlier layer whose keys and values it reads, after norms and rotation. None: its own.
  std::optional<std::uint64_t> keys_of;
  MapSpec out;

  /// Width of the results of one head.
  [[nodiscard]] std::uint64_t value_width() const {
    const auto* const latent = std::get_if<LatentMaps>(&maps);
    return latent == nullptr ? heads.head_dim : latent->values;
  }
  [[nodiscard]] std::uint64_t queries() const { return heads.heads * heads.head_dim; }
  [[nodiscard]] std::uint64_t keys() const { return heads.kv_heads * heads.head_dim; }

  friend bool operator==(const AttentionSpec&, const AttentionSpec&) = default;
};

/// Gated delta net: a causal convolution over the channels of queries, keys and values, a
/// recurrence per head (host/delta_rule.h), and a gated norm. The outputs of `maps` are, side by
/// side, queries, keys, values, gates, `b` and `a`: each has a map, or the first three have one. If
/// `by_key_head`, there are two maps: one for the first four of these, for one head of keys after
/// the other, and one for `b` and `a`. Source: Yang et al., "Gated Delta Networks", 2025.
struct DeltaSpec {
  std::uint64_t key_heads = 0;    ///< heads of queries and of keys
  std::uint64_t value_heads = 0;  ///< a multiple of key_heads
  std::uint64_t key_width = 0;
  std::uint64_t value_width = 0;
  std::uint64_t taps = 0;                ///< width of the convolution
  double beta_factor = 1.0;              ///< multiplies beta; 2: eigenvalues may be negative
  std::vector<std::string> convolution;  ///< [channels, 1, taps], or of queries, keys and values
  std::string decay;                     ///< [value_heads], the logarithms of the decay rates
  std::string shift;                     ///< [value_heads]
  NormSpec norm;                         ///< [value_width]
  bool by_key_head = false;
  std::vector<MapSpec> maps;
  MapSpec out;

  [[nodiscard]] std::uint64_t keys() const { return key_heads * key_width; }
  [[nodiscard]] std::uint64_t values() const { return value_heads * value_width; }
  [[nodiscard]] std::uint64_t channels() const { return 2 * keys() + values(); }

  friend bool operator==(const DeltaSpec&, const DeltaSpec&) = default;
};

/// Gated short convolution: `in` makes B, C and x of all channels, and the result is
/// out(C * convolution(B * x)). The convolution is causal, with weights for each channel. Source:
/// Liquid AI, "LFM2 Technical Report", 2025, section 2.
struct ConvolutionSpec {
  std::uint64_t channels = 0;
  std::uint64_t taps = 0;   ///< tokens that it reads for a token, including its own
  std::string convolution;  ///< [channels, 1, taps]
  bool bias = false;        ///< the convolution has a bias [channels]
  MapSpec in;               ///< [3 x channels, H]
  MapSpec out;              ///< [H, channels]

  friend bool operator==(const ConvolutionSpec&, const ConvolutionSpec&) = default;
};

struct MlpSpec {
  /// Gated: gate and up, or one map with rows in that order. Else one map.
  std::vector<MapSpec> in;
  MapSpec out;
  std::uint64_t width = 0;
  bool gated = true;
  Activation activation = Activation::silu;
  float limit = 0.0F;  ///< if it is gated, see Gating
  float slope = 1.0F;

  friend bool operator==(const MlpSpec&, const MlpSpec&) = default;
};

/// Experts instead of an MLP, in their own blocks. The router sends each token to some experts.
/// Their results, weighted by the router's probabilities, are added to the residual stream in fp32.
/// If the sublayer has a norm after it, they are summed alone and rounded, and the norm has its own
/// block.
struct ExpertsSpec {
  std::uint64_t count = 0;
  std::uint64_t per_token = 0;  ///< experts per token
  std::uint64_t width = 0;      ///< width of an expert's MLP
  bool renormalises = false;    ///< the weights of a token's experts are divided by their sum
  bool sigmoid = false;         ///< scores are sigmoids of the logits; false: their softmax
  std::string correction;       ///< buffer [count], added to scores for the choice; "": none
  bool correction_row = false;  ///< files have the buffer as [1, count]
  double least_sum = 0.0;       ///< lower bound of the sum that renormalises a softmax's weights
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
  Activation activation = Activation::silu;
  float limit = 0.0F;  ///< see Gating
  float slope = 1.0F;
  /// The expert for all tokens: its maps have their own prefix, and the sigmoid of a map [1, H] is
  /// its weight. Without that map, its weight is 1.
  std::uint64_t shared_width = 0;  ///< 0: none
  std::string shared_prefix;
  /// Names of its gate and up, or of one map with their rows in this order. Empty: `gate`, `up`.
  std::vector<std::string> shared_in;
  std::string shared_out;  ///< the last map, if shared_in is given
  std::string shared_gate;
  double shared_factor = 1.0;  ///< multiplies its weight
  /// Beginnings of names in files, and those in transformers' class in their place.
  std::vector<std::pair<std::string, std::string>> in_class = {};

  /// Returns the name in transformers' class of a module or parameter that files call `name`.
  [[nodiscard]] std::string name_in_class(const std::string& name) const {
    for (const auto& [file, own] : in_class) {
      if (name.starts_with(file)) return own + name.substr(file.size());
    }
    return name;
  }
  [[nodiscard]] std::string of_expert(std::uint64_t number, const std::string& name) const {
    return stacked || fused ? prefix + name : prefix + std::to_string(number) + "." + name;
  }

  friend bool operator==(const ExpertsSpec&, const ExpertsSpec&) = default;
};

/// The first tensor of ExpertsSpec::fused.
inline constexpr const char* kFusedGate = "gate_up_proj";

/// Experts in addition to the MLP of a layer, in the block of the layer. With x, the residual
/// stream after attention, the router reads x / rms(x) * scale / sqrt(H). The weights of a token's
/// experts are divided by their sum. compute/mlp_with_experts_part.h has the formula.
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

/// An MLP, and experts that read the residual stream: norm(mlp) + norm(experts).
struct MlpWithExpertsSpec {
  MlpSpec mlp;
  LayerExpertsSpec experts;

  friend bool operator==(const MlpWithExpertsSpec&, const MlpWithExpertsSpec&) = default;
};

/// Inputs of a layer besides the residual stream. For a token with the embedding e (scaled), layer
/// l gets p = (n(P e / sqrt(H))_l + sqrt(width) T_l[token]) / sqrt(2). The sublayer computes
/// out(gelu(gate(x)) * p). P and n belong to the block of the first layer, and each layer has its
/// columns of the table T, in a block of BlockContent::layer_embedding. Source: the class
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

using BodySpec = std::variant<AttentionSpec, DeltaSpec, ConvolutionSpec, MlpSpec, ExpertsSpec,
                              MlpWithExpertsSpec, LayerEmbeddingSpec>;

/// The input of a sublayer's norm, or of its body if it has no norm.
enum class Reads : std::uint8_t {
  stream,       ///< the residual stream after the sublayer before it
  layer_input,  ///< the input of the layer
  same_norm     ///< the result of the norm of the sublayer before it; it has no norm
};

/// stream += factor after(body(before(what it reads)))
struct SublayerSpec {
  std::optional<NormSpec> before;
  BodySpec body;
  std::optional<NormSpec> after;
  Reads reads = Reads::stream;
  double factor = 1.0;  ///< multiplies the result; not together with `after`

  friend bool operator==(const SublayerSpec&, const SublayerSpec&) = default;
};

struct LayerSpec {
  std::string prefix;  ///< common prefix of the tensors' names
  std::vector<SublayerSpec> sublayers;
  bool input_first = false;            ///< matrices are [in, out]; false: [out, in]
  std::optional<NormSpec> input_norm;  ///< replaces the layer's input; has no weights
  std::string result_scale;            ///< a buffer [1] that multiplies the layer's result

  /// Returns the first body of type B, or nullptr.
  template <class B>
  [[nodiscard]] const B* find() const {
    for (const SublayerSpec& sublayer : sublayers) {
      if (const B* const body = std::get_if<B>(&sublayer.body)) return body;
    }
    return nullptr;
  }

  /// Returns the maps of heads of the first attention, or nullptr.
  [[nodiscard]] const HeadMaps* head_maps() const {
    const auto* const attention = find<AttentionSpec>();
    return attention == nullptr ? nullptr : std::get_if<HeadMaps>(&attention->maps);
  }

  friend bool operator==(const LayerSpec&, const LayerSpec&) = default;
};

/// Returns the layer's body of type B, for a family that changes some of its fields.
template <class B>
B& body_of(LayerSpec& layer) {
  for (SublayerSpec& sublayer : layer.sublayers) {
    if (B* const body = std::get_if<B>(&sublayer.body)) return *body;
  }
  throw Error(ErrorCategory::state, "the layer has no such body");
}
inline AttentionSpec& attention_of(LayerSpec& layer) {
  return body_of<AttentionSpec>(layer);
}
inline MlpSpec& mlp_of(LayerSpec& layer) {
  return body_of<MlpSpec>(layer);
}
inline HeadMaps& maps_of(LayerSpec& layer) {
  return std::get<HeadMaps>(attention_of(layer).maps);
}

}  // namespace ballast::model
