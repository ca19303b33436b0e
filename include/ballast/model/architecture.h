#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/core/units.h"

namespace ballast::model {

/// The `model` section of a config: what a transformer looks like. Keys have the names of Hugging
/// Face's configs or ones close to them. A 0 stands for a default, which complete() fills in.
struct ModelConfig {
  std::string family = "gpt2";  ///< a registered family (family.h)
  std::uint64_t vocab_size = 256;
  std::uint64_t hidden_size = 0;
  std::uint64_t num_layers = 0;
  std::uint64_t num_heads = 0;
  std::uint64_t num_kv_heads = 0;       ///< heads of keys and values; 0: num_heads
  std::uint64_t head_dim = 0;           ///< values of one head; 0: hidden_size / num_heads
  std::uint64_t intermediate_size = 0;  ///< width of the MLP; 0: the family's default
  std::uint64_t max_sequence = 0;       ///< longest sequence, in tokens
  double norm_epsilon = 1e-5;
  bool tie_embeddings = true;
  double init_stddev = 0.02;
  /// Keys that only some families have, by name (Family::numbers).
  std::map<std::string, double, std::less<>> numbers;

  /// Of `numbers`. Throws Error(state) when it is not there.
  [[nodiscard]] double number(std::string_view key) const;
};

/// Is called with a key of the model section and the rule that its value breaks, and throws.
using Refuse = std::function<void(std::string_view key, const std::string& rule)>;

/// Fills in the defaults that depend on other keys, and checks all rules of the family and of
/// models in general. Throws Error(config) for an unknown family.
void complete(ModelConfig& config, const Refuse& refuse);

enum class BlockKind { embedding, layer, head };
enum class Init { zeros, ones, normal };

/// One tensor of a block. `offset` counts elements from the start of the block's flat buffer, the
/// same for every kind of state (weight, remainder, moments, gradient).
struct TensorSpec {
  std::string name;  ///< Hugging Face's name
  std::vector<std::uint64_t> shape;
  Elems offset = 0;
  Elems size = 0;
  Init init = Init::zeros;
  double stddev = 0.0;  ///< for Init::normal
};

/// One block: the unit of placement, transfer and update. Tensors are padded so that each starts on
/// a cache line in every kind of state (32 elements), the block to whole pages (2048 elements).
/// Padding is zero and stays zero under the update.
struct BlockSpec {
  BlockKind kind = BlockKind::layer;
  std::string name;    ///< "embedding", "layer 0", "head"
  std::string prefix;  ///< what the names of the tensors have in common: "model.layers.0."
  std::vector<TensorSpec> tensors;
  Elems parameters = 0;  ///< without padding
  Elems elements = 0;    ///< with padding
  /// Elements of all matrices that each token is multiplied with, and of the last of them where a
  /// backward pass does not compute its result again.
  Elems product_elements = 0;
  Elems last_product_elements = 0;
  std::uint64_t attention_width = 0;  ///< heads x head_dim; 0: no attention

  /// The tensor of that name, with or without the prefix; nullptr when there is none.
  [[nodiscard]] const TensorSpec* find(std::string_view tensor_name) const;
  /// The same. Throws Error(state) when there is none.
  [[nodiscard]] const TensorSpec& tensor(std::string_view tensor_name) const;
};

/// Names of the tensors outside the layers.
struct OuterTensors {
  std::string tokens;         ///< of the embedding: [vocab_size, hidden_size]
  std::string positions;      ///< of the embedding: [max_sequence, hidden_size], learned; "": none
  std::string norm;           ///< of the head: NORM.weight, and NORM.bias where there is one
  bool norm_has_bias = true;  ///< a LayerNorm; false: an RMSNorm
  std::string output = "lm_head.weight";  ///< of the head: [vocab_size, hidden_size] unless tied
};

/// A model as a list of blocks: embedding, layers, head. With tied embeddings the head has no
/// weight matrix of its own and reads the embedding's.
struct Architecture {
  ModelConfig config;  ///< complete
  OuterTensors outer;
  std::vector<BlockSpec> blocks;

  [[nodiscard]] Elems parameters() const;
  /// Matrix-multiply FLOPs of the forward pass of block `index` for `sequences` sequences of
  /// `length` tokens; backward counts twice that, recompute once. Attention's products count as
  /// executed (causal half).
  [[nodiscard]] double forward_flops(std::size_t index, std::uint64_t sequences,
                                     std::uint64_t length) const;
  /// The part of it that the backward pass of block `index` computes again: for a layer all but the
  /// last product, for other blocks nothing.
  [[nodiscard]] double recomputed_flops(std::size_t index, std::uint64_t sequences,
                                        std::uint64_t length) const;
};

/// Completes the numbers and lays out the blocks. Throws Error(config) naming the key and the rule
/// that it breaks.
Architecture build_architecture(ModelConfig config);

/// Initial fp32 values of elements [first, first + out.size()) of `tensor` for `seed`: a value
/// depends only on the seed, the tensor's name and the element's index.
void initialize(const TensorSpec& tensor, std::uint64_t seed, Elems first, std::span<float> out);

}  // namespace ballast::model
