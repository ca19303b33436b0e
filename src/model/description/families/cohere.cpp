#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include <fmt/format.h>

#include "src/model/description/families/families.h"
#include "src/model/description/families/llama.h"

namespace ballast::model {
namespace {

/// Command A: attention and the MLP read the result of one LayerNorm without bias. Neighbours
/// rotate together, and layers without a window have no positions. The class is named after that in
/// Hugging Face's transformers.
class Cohere2 final : public Llama {
 public:
  Cohere2()
      : Llama({.name = "cohere2",
               .checkpoint_class = "Cohere2ForCausalLM",
               .details = {{"rope_theta", 10000.0},
                           {"rope_scaling", {}},
                           {"attention_bias", false},
                           {"logit_scale", 0.0625},
                           {"sliding_window", 4096},
                           {"sliding_window_pattern", 4},
                           {"layer_types", {}}},
               .rules = {.rope = {.longest = 8192}},
               .standards = {{"intermediate_size", 22528},
                             {"tie_word_embeddings", true},
                             {"sliding_window", 4096, true},
                             {kPadToken, 0, true}}}) {}
  void complete(ModelConfig& c, const Refuse& refuse) const override {
    Llama::complete(c, refuse);
    const double pattern = c.number("sliding_window_pattern");
    if (!(pattern >= 1.0) || pattern != std::floor(pattern)) {
      refuse("sliding_window_pattern",
             fmt::format("must be a number of layers, the last of which has no window, got {}",
                         pattern));
    }
    if (!(c.number("logit_scale") > 0.0)) {
      refuse("logit_scale", fmt::format("must be above 0, got {}", c.number("logit_scale")));
    }
  }
  std::vector<Rotary> rotaries(const ModelConfig& c, const Refuse& refuse) const override {
    Rotary rotary = rotary_positions(c, refuse);
    rotary.interleaved = true;
    return {rotary};
  }
  OuterSpec outer(const ModelConfig& c) const override {
    OuterSpec outer = Llama::outer(c);
    outer.norm = norm("model.norm");
    outer.logit_factor = c.number("logit_scale");
    return outer;
  }
  LayerSpec layer(const ModelConfig& c, std::uint64_t index) const override {
    LayerSpec layer = Llama::layer(c, index);
    layer.sublayers[0].before = norm("input_layernorm");
    layer.sublayers[1].before.reset();
    layer.sublayers[1].reads = Reads::same_norm;
    if (attention_of(layer).window == 0) attention_of(layer).rotary.reset();
    return layer;
  }
  std::vector<CheckpointKey> checkpoint_keys() const override {
    std::vector<CheckpointKey> keys = Llama::checkpoint_keys();
    for (CheckpointKey& key : keys) {
      if (key.own != "norm_epsilon") continue;
      key.name = "layer_norm_eps";
      key.standard = 1e-5;
    }
    return keys;
  }

 protected:
  bool is_windowed(const ModelConfig& c, std::uint64_t index) const override {
    return !is_multiple(index + 1, c.number("sliding_window_pattern"));
  }

 private:
  static NormSpec norm(const char* name) {
    return {.name = name, .layer_norm = true, .biased = false};
  }
};

}  // namespace

std::unique_ptr<const Family> families::cohere2() {
  return std::make_unique<const Cohere2>();
}

}  // namespace ballast::model
