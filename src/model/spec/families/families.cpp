#include <algorithm>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/core/suggest.h"
#include "ballast/model/family.h"

#include "src/model/spec/families/delta.h"
#include "src/model/spec/families/experts.h"
#include "src/model/spec/families/gemma.h"
#include "src/model/spec/families/gpt2.h"
#include "src/model/spec/families/gpt_neox.h"
#include "src/model/spec/families/latent.h"
#include "src/model/spec/families/llama.h"
#include "src/model/spec/families/llama_variants.h"

namespace ballast::model {
namespace {

template <class... F>
std::vector<std::unique_ptr<const Family>> make_families() {
  std::vector<std::unique_ptr<const Family>> made;
  (made.push_back(std::make_unique<const F>()), ...);
  return made;
}

/// The registered families. New ones are added here; the first is the default.
std::vector<std::unique_ptr<const Family>>& families() {
  static auto all = [] {
    auto made = make_families<Gpt2, Llama, Mistral, Ministral3, Qwen2, Qwen3, SmolLm3, Phi3, Olmo2,
                              Olmo3, Gemma2, Gemma3, Gemma4, GptNeoX>();
    std::ranges::move(families_with_experts(), std::back_inserter(made));
    std::ranges::move(families_with_latent_attention(), std::back_inserter(made));
    std::ranges::move(families_with_delta_nets(), std::back_inserter(made));
    return made;
  }();
  return all;
}

}  // namespace

void add_family(std::unique_ptr<const Family> family) {
  families().push_back(std::move(family));
}

std::vector<std::string> family_names() {
  std::vector<std::string> names;
  for (const auto& one : families()) names.emplace_back(one->name());
  return names;
}

const Family& family(std::string_view name) {
  for (const auto& one : families()) {
    if (one->name() == name) return *one;
  }
  const std::vector<std::string> names = family_names();
  throw Error(ErrorCategory::config,
              fmt::format("model.family: '{}' is not a family; choose one of {}{}", name,
                          listed(names), did_you_mean(name, names)));
}

std::uint64_t last_reader_of_keys(const ModelConfig& config, std::uint64_t index) {
  const Family& described = family(config.family);
  std::uint64_t last = index;
  for (std::uint64_t layer = index + 1; layer < config.num_layers; ++layer) {
    if (described.keys_of(config, layer) == index) last = layer;
  }
  return last;
}

bool links_layers(const ModelConfig& config) {
  const Family& described = family(config.family);
  if (described.layer_input_width(config) > 0) return true;
  for (std::uint64_t layer = 0; layer < config.num_layers; ++layer) {
    if (described.keys_of(config, layer) != layer) return true;
  }
  return false;
}

bool has_experts(const ModelConfig& config) {
  const Family& described = family(config.family);
  for (std::uint64_t layer = 0; layer < config.num_layers; ++layer) {
    if (described.experts_of_layer(config, layer) > 0) return true;
  }
  return false;
}

ModelConfig default_config(std::string_view family_name) {
  const Family& described = family(family_name);
  ModelConfig config;
  config.family = family_name;
  config.tie_embeddings = described.ties_embeddings();
  for (const DetailKey& key : described.details()) config.details[key.name] = key.standard;
  return config;
}

}  // namespace ballast::model
