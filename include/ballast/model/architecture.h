#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ballast/core/units.h"

namespace ballast::model {

/// gpt2: LayerNorm, learned positions, GELU (tanh form), biases, tied head.
/// llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases.
enum class Family { gpt2, llama };

/// What a transformer looks like. Names follow Hugging Face's configs.
struct ModelConfig {
  Family family = Family::gpt2;
  std::uint64_t vocab_size = 0;
  std::uint64_t hidden_size = 0;
  std::uint64_t num_layers = 0;
  std::uint64_t num_heads = 0;
  std::uint64_t num_kv_heads = 0;       ///< llama; divides num_heads
  std::uint64_t intermediate_size = 0;  ///< width of the MLP
  std::uint64_t max_sequence = 0;       ///< gpt2: number of learned positions
  double norm_epsilon = 1e-5;
  double rope_theta = 10000.0;  ///< llama
  bool tie_embeddings = true;
  double init_stddev = 0.02;

  [[nodiscard]] std::uint64_t head_size() const { return hidden_size / num_heads; }
};

enum class BlockKind { embedding, layer, head };
enum class Init { zeros, ones, normal };

/// One tensor of a block. `offset` counts elements from the start of the block's flat buffer, the
/// same for every kind of state (weight, remainder, moments, gradient).
struct TensorSpec {
  std::string name;  ///< Hugging Face's name; gpt2's Conv1D weights keep their [in, out] layout
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
  std::string name;  ///< "embedding", "layer 0", "head"
  std::vector<TensorSpec> tensors;
  Elems parameters = 0;  ///< without padding
  Elems elements = 0;    ///< with padding

  /// The tensor of that name. Throws Error(state) when there is none.
  [[nodiscard]] const TensorSpec& tensor(const std::string& tensor_name) const;
};

/// A model as a list of blocks: embedding, layers, head. With tied embeddings the head has no
/// weight matrix of its own and reads the embedding's.
struct Architecture {
  ModelConfig config;
  std::vector<BlockSpec> blocks;

  [[nodiscard]] Elems parameters() const;
  /// Matrix-multiply FLOPs of the forward pass of block `index` for `sequences` sequences of
  /// `length` tokens; backward counts twice that, recompute once. Attention's products count as
  /// executed (causal half).
  [[nodiscard]] double forward_flops(std::size_t index, std::uint64_t sequences,
                                     std::uint64_t length) const;
  /// What the backward pass of block `index` really computes of that again: for a layer all but its
  /// last product, whose result it has no use for; for other blocks nothing.
  [[nodiscard]] double recomputed_flops(std::size_t index, std::uint64_t sequences,
                                        std::uint64_t length) const;
};

/// Checks the numbers (Error(config) naming the key and the rule it breaks) and lays out the
/// blocks.
Architecture build_architecture(const ModelConfig& config);

/// "gpt2" or "llama". parse throws Error(config) with a suggestion.
std::string_view to_string(Family family) noexcept;
Family parse_family(std::string_view name);

/// Initial fp32 values of elements [first, first + out.size()) of `tensor` for `seed`: a value
/// depends only on the seed, the tensor's name and the element's index.
void initialize(const TensorSpec& tensor, std::uint64_t seed, Elems first, std::span<float> out);

}  // namespace ballast::model
