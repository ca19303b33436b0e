#include "src/model/description/families/families.h"

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/model/family.h"

#include "src/model/description/layer_rules.h"

namespace ballast::model {

namespace {

/// The registered families.
std::vector<std::unique_ptr<const Family>>& registered() {
  static auto all = [] {
    std::vector<std::unique_ptr<const Family>> made;
#define BALLAST_MAKE_FAMILY(name) made.push_back(families::name());
    BALLAST_FAMILIES(BALLAST_MAKE_FAMILY)
#undef BALLAST_MAKE_FAMILY
    return made;
  }();
  return all;
}

}  // namespace

void add_family(std::unique_ptr<const Family> family) {
  registered().push_back(std::move(family));
}

std::string default_family() {
  return std::string(registered().front()->name());
}

std::vector<std::string> family_names() {
  std::vector<std::string> names;
  for (const auto& one : registered()) names.emplace_back(one->name());
  return names;
}

const Family& family(std::string_view name) {
  for (const auto& one : registered()) {
    if (one->name() == name) return *one;
  }
  const std::vector<std::string> names = family_names();
  throw Error(ErrorCategory::config,
              fmt::format("model.family: '{}' is not a family; choose one of {}{}", name,
                          listed(names), did_you_mean(name, names)));
}

std::vector<Rotary> Family::rotaries(const ModelConfig& /*config*/,
                                     const Refuse& /*refuse*/) const {
  return {};
}

void set_standards(std::vector<CheckpointKey>& keys,
                   const std::vector<CheckpointStandard>& standards) {
  for (const CheckpointStandard& standard : standards) {
    for (CheckpointKey& key : keys) {
      if (key.name != standard.name) continue;
      key.standard = standard.value;
      key.nullable = standard.nullable;
    }
  }
}

CheckpointKey checkpoint_key(const DetailKey& detail) {
  return {detail.name, detail.name, {}, detail.standard, detail.standard.is_null()};
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

using text::Json;

struct Refused {};

/// Effects of the keys of the model section, in a form that can be compared.
struct Facts {
  std::vector<LayerSpec> layers;  ///< without indices of rotary positions, which say nothing
  std::vector<std::array<Rotary, 3>> rotaries;  ///< for keys, queries, growth of queries
  OuterSpec outer;
  std::array<double, 2> losses = {};  ///< coefficients
  std::string longest;                ///< limit of the length of sequences

  friend bool operator==(const Facts&, const Facts&) = default;
};

/// Adds the effects on a layer.
void add_layer(Facts& facts, LayerSpec layer, const std::vector<Rotary>& rotaries) {
  std::array<Rotary, 3>& own = facts.rotaries.emplace_back();
  if (layer.find<AttentionSpec>() != nullptr) {
    std::optional<RotarySpec>& at = attention_of(layer).rotary;
    if (at) {
      own = {rotaries.at(at->keys), rotaries.at(at->queries)};
      if (at->growth > 0) own[2] = rotaries.at(at->growth);
      at = RotarySpec{};
    }
  }
  facts.layers.push_back(std::move(layer));
}

/// The facts about a config before complete(); nothing if it is not valid.
std::optional<Facts> facts_of(ModelConfig c) {
  const Family& described = family(c.family);
  const auto refuse = [](std::string_view, const std::string&) { throw Refused(); };
  try {
    complete(c, refuse);
    const std::vector<Rotary> rotaries = described.rotaries(c, refuse);
    Facts facts = {.outer = described.outer(c)};
    for (LayerSpec& layer : layers_of(c)) add_layer(facts, std::move(layer), rotaries);
    const RouterLosses losses = router_losses(c);
    facts.losses = {losses.balance, losses.z};
    constexpr std::uint64_t kLongest = std::uint64_t{1} << 30U;
    facts.longest = described.obstacle_to_length(c, kLongest);
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
