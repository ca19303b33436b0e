#include "src/model/description/families/families.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/model/family.h"

#include "src/model/description/families/decoder.h"
#include "src/model/description/families/gemma.h"
#include "src/model/description/families/gpt.h"
#include "src/model/description/families/llama.h"

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

namespace {

/// Returns the detail with this name, or nullptr if the family lacks it or it is null.
const text::Json* given_detail(const ModelConfig& c, std::string_view name) {
  const auto found = c.details.find(name);
  return found == c.details.end() || found->second.is_null() ? nullptr : &found->second;
}

}  // namespace

bool Llama::is_sliding(const ModelConfig& c, std::uint64_t index) const {
  const text::Json* const types = given_detail(c, "layer_types");
  return types == nullptr ? is_windowed(c, index) : types->elements()[index] == "sliding_attention";
}

std::uint64_t Llama::window(const ModelConfig& c, std::uint64_t index) const {
  const text::Json* const tokens = given_detail(c, "sliding_window");
  const text::Json* const used = given_detail(c, "use_sliding_window");
  if (tokens == nullptr || (used != nullptr && !used->flag())) return 0;
  return is_sliding(c, index) ? *tokens->whole() : 0;
}

void Llama::check_windows(const ModelConfig& c, const Refuse& refuse) {
  const text::Json* const tokens = given_detail(c, "sliding_window");
  const text::Json* const used = given_detail(c, "use_sliding_window");
  const bool unused = used != nullptr && !used->flag();  // transformers then writes 0
  if (tokens != nullptr && (!tokens->whole() || (*tokens->whole() == 0 && !unused))) {
    refuse("sliding_window",
           fmt::format("must be a number of tokens, got {}", tokens->described()));
  }
  const text::Json* const types = given_detail(c, "layer_types");
  if (types == nullptr) return;
  bool known = types->is_array() && types->elements().size() == c.num_layers;
  for (const text::Json& type : types->elements()) {
    known = known && (type == "sliding_attention" || type == "full_attention");
  }
  if (known) return;
  refuse("layer_types",
         fmt::format("must be a list of num_layers ({}) words, \"full_attention\" or "
                     "\"sliding_attention\"",
                     c.num_layers));
}

namespace {

using text::Json;

struct Refused {};

/// Effects of the keys of the model section on one layer.
struct LayerFacts {
  DecoderSpec spec;
  std::array<std::optional<Rotary>, 3> rotaries;  ///< for keys, queries, growth of queries
  HeadExtents heads;
  std::uint64_t keys_of = 0;
  std::uint64_t mlp_width = 0;

  friend bool operator==(const LayerFacts&, const LayerFacts&) = default;
};

/// Effects of the keys of the model section, in a form that can be compared.
struct Facts {
  std::vector<LayerFacts> layers;
  std::array<double, 5> scores = {};  ///< factor and caps, coefficients of router losses
  std::string longest;                ///< limit of the length of sequences

  friend bool operator==(const Facts&, const Facts&) = default;
};

LayerFacts facts_of_layer(const DecoderFamily& family, const ModelConfig& c, std::uint64_t index,
                          const std::vector<Rotary>& rotaries) {
  LayerFacts facts = {.spec = family.decoder(c, index),
                      .rotaries = {},
                      .heads = family.heads(c, index),
                      .keys_of = family.keys_of(c, index)};
  const DecoderSpec& spec = facts.spec;
  if (spec.experts.count == 0) {
    facts.mlp_width = spec.mlp_width == 0 ? c.intermediate_size : spec.mlp_width;
  }
  if (spec.rotates && !rotaries.empty()) {
    facts.rotaries[0] = rotaries.at(spec.rotary);
    if (spec.query_rotary > 0) facts.rotaries[1] = rotaries.at(spec.query_rotary);
    if (spec.query_growth > 0) facts.rotaries[2] = rotaries.at(spec.query_growth);
  }
  // The indices say nothing.
  facts.spec.rotary = facts.spec.query_rotary = 0;
  return facts;
}

/// The facts about a config before complete(); nothing if it is not valid.
std::optional<Facts> facts_of(ModelConfig c) {
  const auto* const described = dynamic_cast<const DecoderFamily*>(&family(c.family));
  if (described == nullptr) return {};
  const auto refuse = [](std::string_view, const std::string&) { throw Refused(); };
  try {
    complete(c, refuse);
    const std::vector<Rotary> rotaries = described->rotaries(c, refuse);
    Facts facts;
    for (std::uint64_t index = 0; index < c.num_layers; ++index) {
      facts.layers.push_back(facts_of_layer(*described, c, index, rotaries));
    }
    const RouterLosses losses = router_losses(c);
    facts.scores = {described->score_scale(c), described->score_cap(c), described->logit_cap(c),
                    losses.balance, losses.z};
    constexpr std::uint64_t kLongest = std::uint64_t{1} << 30U;
    facts.longest = described->obstacle_to_length(c, kLongest);
    return facts;
  } catch (const Refused&) {
    return {};
  }
}

/// Other values for a key with the default `standard`, valid ones among them.
std::vector<Json> other_values(const Json& standard, const Json& given, std::uint64_t layers) {
  std::vector<Json> values = {standard, Json()};
  if (given.is_boolean()) values.emplace_back(!given.flag());
  if (given.is_number()) {
    for (const double factor : {2.0, 0.5}) values.emplace_back(given.number() * factor);
    for (const std::uint64_t whole : {0, 1, 2, 3, 4, 8, 16}) values.emplace_back(whole);
    if (const auto whole = given.whole()) {
      for (const std::uint64_t near : {*whole + 1, *whole * 2, *whole / 2})
        values.emplace_back(near);
    }
  }
  if (given.is_string()) values.insert(values.end(), {Json("gelu"), Json("gelu_new")});
  if (given.is_object()) {
    values.push_back(Json::object({{"rope_type", "linear"}, {"factor", 3.0}}));
  }
  if (!given.is_array()) return values;
  values.push_back(Json::array());
  values.push_back(Json::array({0}));
  const std::array<Json, 7> members = {
      "full_attention", "sliding_attention", "linear_attention", "dense", "sparse", 0, 1};
  for (const Json& member : members) {
    Json list = Json::array();
    for (std::uint64_t layer = 0; layer < layers; ++layer) list.push_back(member);
    values.push_back(std::move(list));
  }
  return values;
}

bool is_used(const ModelConfig& given, const Facts& facts, const Json& standard,
             const std::string& key) {
  bool tried = false;
  const Json& own = given.detail(key);
  for (Json& value : other_values(standard, own, given.num_layers)) {
    if (value.compact() == own.compact()) continue;
    const bool is_default = value.compact() == standard.compact();
    const bool fits =
        value.is_null() || standard.is_null() || value.is_number() == standard.is_number();
    if (!is_default && (!fits || (value.is_null() && !standard.is_null()))) continue;
    ModelConfig other = given;
    other.details[key] = std::move(value);
    const std::optional<Facts> changed = facts_of(std::move(other));
    if (!changed) continue;
    if (!(*changed == facts)) return true;
    tried = true;
  }
  return !tried;
}

}  // namespace

std::vector<std::string> families_with_key(std::string_view key) {
  std::vector<std::string> names = family_names();
  std::erase_if(names, [key](const std::string& name) {
    const std::vector<DetailKey> details = family(name).details();
    return std::ranges::find(details, key, &DetailKey::name) == details.end();
  });
  return names;
}

std::vector<std::string> unused_keys(const ModelConfig& given, std::span<const std::string> keys) {
  if (keys.empty()) return {};
  const std::optional<Facts> facts = facts_of(given);
  if (!facts) return {};
  std::vector<std::string> unused;
  for (const DetailKey& detail : family(given.family).details()) {
    const bool asked = std::ranges::find(keys, detail.name) != keys.end();
    if (!asked || given.detail(detail.name).compact() == detail.standard.compact()) continue;
    if (!is_used(given, *facts, detail.standard, detail.name)) unused.push_back(detail.name);
  }
  return unused;
}

}  // namespace ballast::model
