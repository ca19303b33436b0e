#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "src/model/description/families/families.h"
#include "src/model/description/families/llama.h"

namespace ballast::model {
namespace {

// The classes are named after those in Hugging Face's transformers.

/// Has biases for queries, keys and values.
class Qwen2 final : public Llama {
 public:
  Qwen2()
      : Llama({.name = "qwen2",
               .checkpoint_class = "Qwen2ForCausalLM",
               .details = {{"rope_theta", 10000.0},
                           {"rope_scaling", {}},
                           {"use_sliding_window", false},
                           {"sliding_window", {}},
                           {"max_window_layers", 28},
                           {"layer_types", {}}},
               .rules = {.rope = {.longest = 32768}},
               .standards = {{"num_key_value_heads", 32, true},
                             {"intermediate_size", 22016},
                             {"sliding_window", 4096, true}}}) {}
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    LayerSpec layer = Llama::layer(c, index);
    for (MapSpec& map : maps_of(layer).maps) map.bias = true;
    return layer;
  }

 protected:
  bool is_windowed(const ModelConfig& c, std::uint64_t index) const override {
    return static_cast<double>(index) >= c.number("max_window_layers");
  }
};

/// Has norms for each head of queries and keys.
class Qwen3 : public Llama {
 public:
  Qwen3()
      : Llama({.name = "qwen3",
               .checkpoint_class = "Qwen3ForCausalLM",
               .details = keys(),
               .rules = {.rope = {.longest = 32768}},
               .standards = {{"num_key_value_heads", 32, true},
                             {"head_dim", 128},
                             {"intermediate_size", 22016},
                             {"sliding_window", 4096, true}}}) {}
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    LayerSpec layer = Llama::layer(c, index);
    add_head_norms(layer);
    return layer;
  }

 protected:
  using Llama::Llama;
  static std::vector<DetailKey> keys() {
    return {{"rope_theta", 10000.0},   {"rope_scaling", {}},
            {"attention_bias", false}, {"use_sliding_window", false},
            {"sliding_window", {}},    {"max_window_layers", 28},
            {"layer_types", {}}};
  }
  bool is_windowed(const ModelConfig& c, std::uint64_t index) const override {
    return static_cast<double>(index) >= c.number("max_window_layers");
  }
};

/// Qwen 3 with experts in the layers selected by decoder_sparse_step and mlp_only_layers. With
/// use_sliding_window all layers have the window.
class Qwen3Moe final : public Qwen3 {
 public:
  Qwen3Moe()
      : Qwen3({.name = "qwen3_moe",
               .checkpoint_class = "Qwen3MoeForCausalLM",
               .details = with_sparse_layers(keys(), 8, 768),
               .rules = {.rope = {.longest = 32768},
                         .aliases = {{"num_local_experts", "num_experts"}},
                         .without_effect = {"max_window_layers"},
                         .peft_converts = true},
               .standards = {{"num_key_value_heads", 4},
                             {"intermediate_size", 6144},
                             {"sliding_window", 4096, true},
                             {"num_experts", 128}}}) {}
  void complete(ModelConfig& c, const Refuse& refuse) const override {
    Qwen3::complete(c, refuse);
    check_sparse_layers(c, refuse);
  }
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    LayerSpec layer = Qwen3::layer(c, index);
    if (!is_sparse(c, index)) return layer;
    ExpertsSpec experts = usual_experts(c, "num_experts", whole_number(c, "moe_intermediate_size"));
    experts.renormalises = c.flag("norm_topk_prob");
    return instead_of_mlp(std::move(layer), std::move(experts));
  }
  std::vector<CheckpointKey> checkpoint_keys() const override {
    std::vector<CheckpointKey> keys = keys_of_checkpoints(Qwen3::checkpoint_keys());
    std::erase_if(keys, [](const CheckpointKey& key) {  // all layers have the window
      return key.name == "max_window_layers" || key.name == "layer_types";
    });
    return keys;
  }

 protected:
  bool is_windowed(const ModelConfig& /*config*/, std::uint64_t /*index*/) const override {
    return true;
  }
};

/// Mellum 2: Qwen 3 with experts in some layers, and rotary positions by type of layer.
class Mellum final : public Llama {
 public:
  Mellum()
      : Llama({.name = "mellum",
               .checkpoint_class = "MellumForCausalLM",
               .details = with_experts({{"rope_theta", 500000.0},
                                        {"rope_scaling", {}},
                                        {"rope_local_base_freq", 10000.0},
                                        {"attention_bias", false},
                                        {"sliding_window", 1024},
                                        {"layer_types", {}},
                                        {"mlp_layer_types", {}},
                                        {"moe_intermediate_size", std::uint64_t{896}},
                                        {"norm_topk_prob", true}},
                                       "num_experts", 8, 0.001),
               .rules = {.rope = {.longest = 131072, .by_layer_type = true, .local_theta = ""},
                         .aliases = {{"num_local_experts", "num_experts"},
                                     {"rope_scaling", "rope_parameters"}},
                         .without_effect = {"num_nextn_predict_layers", "num_mtp_layers",
                                            "mtp_layer_types", "mtp_mlp_layer_types"},
                         .peft_converts = true},
               .standards = {{"num_key_value_heads", 4},
                             {"head_dim", 128},
                             {"intermediate_size", 7168},
                             {"sliding_window", 1024, true},
                             {"num_experts", 64}}}) {}
  void complete(ModelConfig& c, const Refuse& refuse) const override {
    Llama::complete(c, refuse);
    check_experts(c, "num_experts", refuse);
    check_mlp_types(c, refuse);
    whole_number(c, "moe_intermediate_size", 1, refuse);
  }
  std::vector<Rotary> rotaries(const ModelConfig& c, const Refuse& refuse) const override {
    return {rotary_positions(c, refuse), plain_rotary_positions(c, "rope_local_base_freq", refuse)};
  }
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    LayerSpec layer = Llama::layer(c, index);
    add_head_norms(layer);
    const std::size_t rotary = is_sliding(c, index) ? 1 : 0;
    attention_of(layer).rotary = RotarySpec{.keys = rotary, .queries = rotary};
    if (has_mlp(c, index, 0)) return layer;
    ExpertsSpec experts = usual_experts(c, "num_experts", whole_number(c, "moe_intermediate_size"));
    experts.renormalises = c.flag("norm_topk_prob");
    return instead_of_mlp(std::move(layer), std::move(experts));
  }
  std::vector<CheckpointKey> checkpoint_keys() const override {
    return keys_of_checkpoints(Llama::checkpoint_keys());
  }

 protected:
  bool is_windowed(const ModelConfig& /*config*/, std::uint64_t /*index*/) const override {
    return false;
  }
};

/// Qwen 2 with experts in some layers like Qwen3Moe, and one expert for all tokens.
class Qwen2Moe final : public Llama {
 public:
  Qwen2Moe()
      : Llama({.name = "qwen2_moe",
               .checkpoint_class = "Qwen2MoeForCausalLM",
               .details = with_sparse_layers({{"rope_theta", 10000.0},
                                              {"rope_scaling", {}},
                                              {"qkv_bias", true},
                                              {"use_sliding_window", false},
                                              {"sliding_window", {}},
                                              {"max_window_layers", 28},
                                              {"layer_types", {}}},
                                             4, 1408),
               .rules = {.rope = {.longest = 32768}},
               .standards = {{"num_key_value_heads", 16, true},
                             {"intermediate_size", 5632},
                             {"sliding_window", 4096, true},
                             {"num_experts", 60}}}) {}
  std::vector<DetailKey> details() const override {
    std::vector<DetailKey> keys = Llama::details();
    keys.push_back({"shared_expert_intermediate_size", std::uint64_t{5632}});
    return keys;
  }
  void complete(ModelConfig& c, const Refuse& refuse) const override {
    Llama::complete(c, refuse);
    check_sparse_layers(c, refuse);
    whole_number(c, "shared_expert_intermediate_size", 1, refuse);
  }
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    LayerSpec layer = Llama::layer(c, index);
    for (MapSpec& map : maps_of(layer).maps) map.bias = c.flag("qkv_bias");
    if (!is_sparse(c, index)) return layer;
    ExpertsSpec experts = usual_experts(c, "num_experts", whole_number(c, "moe_intermediate_size"));
    experts.renormalises = c.flag("norm_topk_prob");
    experts.shared_width = whole_number(c, "shared_expert_intermediate_size");
    experts.shared_prefix = "mlp.shared_expert.";
    experts.shared_gate = "mlp.shared_expert_gate";
    return instead_of_mlp(std::move(layer), std::move(experts));
  }
  std::vector<CheckpointKey> checkpoint_keys() const override {
    return keys_of_checkpoints(Llama::checkpoint_keys());
  }

 protected:
  bool is_windowed(const ModelConfig& c, std::uint64_t index) const override {
    return index % 2 == 0 && static_cast<double>(index) < c.number("max_window_layers");
  }
};

}  // namespace

std::unique_ptr<const Family> families::qwen2() {
  return std::make_unique<const Qwen2>();
}
std::unique_ptr<const Family> families::qwen3() {
  return std::make_unique<const Qwen3>();
}
std::unique_ptr<const Family> families::mellum() {
  return std::make_unique<const Mellum>();
}
std::unique_ptr<const Family> families::qwen2_moe() {
  return std::make_unique<const Qwen2Moe>();
}
std::unique_ptr<const Family> families::qwen3_moe() {
  return std::make_unique<const Qwen3Moe>();
}

}  // namespace ballast::model
