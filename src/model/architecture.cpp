#include "ballast/model/architecture.h"

#include <array>
#include <cmath>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/core/suggest.h"

namespace ballast::model {
namespace {

/// Elements between starts of tensors (a cache line of the smallest kind of state) and blocks.
constexpr Elems kTensorStep = 32;
constexpr Elems kBlockStep = 2048;

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCategory::config, message);
}

void require_positive(std::uint64_t value, std::string_view key) {
  if (value == 0) refuse(fmt::format("model.{} is 0; it must be at least 1", key));
}

void check(const ModelConfig& c) {
  require_positive(c.vocab_size, "vocab_size");
  require_positive(c.hidden_size, "hidden_size");
  require_positive(c.num_layers, "num_layers");
  require_positive(c.num_heads, "num_heads");
  require_positive(c.num_kv_heads, "num_kv_heads");
  require_positive(c.intermediate_size, "intermediate_size");
  if (c.hidden_size % c.num_heads != 0) {
    refuse(fmt::format("model.hidden_size {} is not divisible by model.num_heads {}", c.hidden_size,
                       c.num_heads));
  }
  if (c.num_heads % c.num_kv_heads != 0) {
    refuse(fmt::format("model.num_heads {} is not divisible by model.num_kv_heads {}", c.num_heads,
                       c.num_kv_heads));
  }
  if (c.vocab_size > 0x7fffffffU) {
    refuse(fmt::format("model.vocab_size {} does not fit 32-bit tokens", c.vocab_size));
  }
  if (!(c.norm_epsilon > 0.0)) refuse("model.norm_epsilon must be above 0");
  if (!(c.init_stddev >= 0.0) || std::isinf(c.init_stddev)) {
    refuse("model.init_stddev must be a finite number, at least 0");
  }
  if (c.family == Family::gpt2) {
    require_positive(c.max_sequence, "max_sequence");
    if (c.num_kv_heads != c.num_heads) {
      refuse(
          fmt::format("model.num_kv_heads {} differs from model.num_heads {}: gpt2 has no "
                      "grouped-query attention; leave it out or use family llama",
                      c.num_kv_heads, c.num_heads));
    }
  } else {
    if (c.head_size() % 2 != 0) {
      refuse(
          fmt::format("model.hidden_size / model.num_heads is {}; rotary positions need an even "
                      "head size",
                      c.head_size()));
    }
    if (!(c.rope_theta > 0.0)) refuse("model.rope_theta must be above 0");
  }
}

/// Collects tensors at their offsets.
class BlockBuilder {
 public:
  BlockBuilder(BlockKind kind, std::string name, std::string prefix) : prefix_(std::move(prefix)) {
    block_.kind = kind;
    block_.name = std::move(name);
  }
  void add(const std::string& name, std::vector<std::uint64_t> shape, Init init,
           double stddev = 0.0) {
    TensorSpec tensor;
    tensor.name = prefix_ + name;
    tensor.size = 1;
    for (const std::uint64_t extent : shape) tensor.size *= extent;
    tensor.shape = std::move(shape);
    tensor.offset = block_.elements;
    tensor.init = init;
    tensor.stddev = stddev;
    block_.parameters += tensor.size;
    block_.elements += round_up(tensor.size, kTensorStep);
    block_.tensors.push_back(std::move(tensor));
  }
  BlockSpec finish() {
    block_.elements = round_up(block_.elements, kBlockStep);
    return std::move(block_);
  }

 private:
  std::string prefix_;
  BlockSpec block_;
};

BlockSpec gpt2_layer(const ModelConfig& c, std::uint64_t index) {
  const auto h = c.hidden_size;
  const auto i = c.intermediate_size;
  const double stddev = c.init_stddev;
  // As in Hugging Face's GPT-2 (and section 2.3 of its paper): what is added to the residual
  // stream starts smaller, for the number of such additions.
  const double residual = stddev / std::sqrt(2.0 * static_cast<double>(c.num_layers));
  BlockBuilder block(BlockKind::layer, fmt::format("layer {}", index),
                     fmt::format("transformer.h.{}.", index));
  block.add("ln_1.weight", {h}, Init::ones);
  block.add("ln_1.bias", {h}, Init::zeros);
  block.add("attn.c_attn.weight", {h, 3 * h}, Init::normal, stddev);
  block.add("attn.c_attn.bias", {3 * h}, Init::zeros);
  block.add("attn.c_proj.weight", {h, h}, Init::normal, residual);
  block.add("attn.c_proj.bias", {h}, Init::zeros);
  block.add("ln_2.weight", {h}, Init::ones);
  block.add("ln_2.bias", {h}, Init::zeros);
  block.add("mlp.c_fc.weight", {h, i}, Init::normal, stddev);
  block.add("mlp.c_fc.bias", {i}, Init::zeros);
  block.add("mlp.c_proj.weight", {i, h}, Init::normal, residual);
  block.add("mlp.c_proj.bias", {h}, Init::zeros);
  return block.finish();
}

BlockSpec llama_layer(const ModelConfig& c, std::uint64_t index) {
  const auto h = c.hidden_size;
  const auto i = c.intermediate_size;
  const auto kv = c.num_kv_heads * c.head_size();
  const double stddev = c.init_stddev;
  BlockBuilder block(BlockKind::layer, fmt::format("layer {}", index),
                     fmt::format("model.layers.{}.", index));
  block.add("input_layernorm.weight", {h}, Init::ones);
  block.add("self_attn.q_proj.weight", {h, h}, Init::normal, stddev);
  block.add("self_attn.k_proj.weight", {kv, h}, Init::normal, stddev);
  block.add("self_attn.v_proj.weight", {kv, h}, Init::normal, stddev);
  block.add("self_attn.o_proj.weight", {h, h}, Init::normal, stddev);
  block.add("post_attention_layernorm.weight", {h}, Init::ones);
  block.add("mlp.gate_proj.weight", {i, h}, Init::normal, stddev);
  block.add("mlp.up_proj.weight", {i, h}, Init::normal, stddev);
  block.add("mlp.down_proj.weight", {h, i}, Init::normal, stddev);
  return block.finish();
}

BlockSpec embedding_block(const ModelConfig& c) {
  const bool gpt2 = c.family == Family::gpt2;
  BlockBuilder block(BlockKind::embedding, "embedding", gpt2 ? "transformer." : "model.");
  block.add(gpt2 ? "wte.weight" : "embed_tokens.weight", {c.vocab_size, c.hidden_size},
            Init::normal, c.init_stddev);
  if (gpt2) {
    block.add("wpe.weight", {c.max_sequence, c.hidden_size}, Init::normal, c.init_stddev);
  }
  return block.finish();
}

BlockSpec head_block(const ModelConfig& c) {
  BlockBuilder block(BlockKind::head, "head", "");
  if (c.family == Family::gpt2) {
    block.add("transformer.ln_f.weight", {c.hidden_size}, Init::ones);
    block.add("transformer.ln_f.bias", {c.hidden_size}, Init::zeros);
  } else {
    block.add("model.norm.weight", {c.hidden_size}, Init::ones);
  }
  if (!c.tie_embeddings) {
    block.add("lm_head.weight", {c.vocab_size, c.hidden_size}, Init::normal, c.init_stddev);
  }
  return block.finish();
}

const std::array<std::string, 2>& family_names() {
  static const std::array<std::string, 2> names = {"gpt2", "llama"};
  return names;
}

}  // namespace

const TensorSpec& BlockSpec::tensor(const std::string& tensor_name) const {
  for (const TensorSpec& spec : tensors) {
    if (spec.name == tensor_name) return spec;
  }
  throw Error(ErrorCategory::state,
              fmt::format("block '{}' has no tensor '{}'", name, tensor_name));
}

Elems Architecture::parameters() const {
  Elems sum = 0;
  for (const BlockSpec& block : blocks) sum += block.parameters;
  return sum;
}

double Architecture::forward_flops(std::size_t index, std::uint64_t sequences,
                                   std::uint64_t length) const {
  expects(index < blocks.size(), "forward_flops: no such block");
  const auto tokens = static_cast<double>(sequences) * static_cast<double>(length);
  const auto hidden = static_cast<double>(config.hidden_size);
  switch (blocks[index].kind) {
    case BlockKind::embedding:
      return 0.0;
    case BlockKind::head:
      return 2.0 * tokens * hidden * static_cast<double>(config.vocab_size);
    case BlockKind::layer:
      break;
  }
  double weights = 0.0;
  for (const TensorSpec& tensor : blocks[index].tensors) {
    if (tensor.shape.size() == 2) weights += static_cast<double>(tensor.size);
  }
  // Two products (scores, weighted values), each over half of length x length.
  const double attention = 2.0 * tokens * static_cast<double>(length) * hidden;
  return 2.0 * tokens * weights + attention;
}

double Architecture::recomputed_flops(std::size_t index, std::uint64_t sequences,
                                      std::uint64_t length) const {
  expects(index < blocks.size(), "recomputed_flops: no such block");
  if (blocks[index].kind != BlockKind::layer) return 0.0;
  const auto tokens = static_cast<double>(sequences) * static_cast<double>(length);
  const double last = 2.0 * tokens * static_cast<double>(config.intermediate_size) *
                      static_cast<double>(config.hidden_size);
  return forward_flops(index, sequences, length) - last;
}

Architecture build_architecture(const ModelConfig& config) {
  Architecture model;
  model.config = config;
  ModelConfig& c = model.config;
  if (c.num_kv_heads == 0) c.num_kv_heads = c.num_heads;
  check(c);
  model.blocks.push_back(embedding_block(c));
  for (std::uint64_t index = 0; index < c.num_layers; ++index) {
    model.blocks.push_back(c.family == Family::gpt2 ? gpt2_layer(c, index) : llama_layer(c, index));
  }
  model.blocks.push_back(head_block(c));
  return model;
}

std::string_view to_string(Family family) noexcept {
  return family_names()[static_cast<std::size_t>(family)];
}

Family parse_family(std::string_view name) {
  for (std::size_t i = 0; i < family_names().size(); ++i) {
    if (family_names()[i] == name) return static_cast<Family>(i);
  }
  throw Error(ErrorCategory::config, fmt::format("model.family: '{}' is no family; choose gpt2 or "
                                                 "llama{}",
                                                 name, did_you_mean(name, family_names())));
}

}  // namespace ballast::model
