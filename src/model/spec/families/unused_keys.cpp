#include "src/model/spec/families/unused_keys.h"

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>
#include <utility>

#include "ballast/model/family.h"

#include "src/model/spec/families/decoder.h"
#include "src/model/spec/families/experts.h"

namespace ballast::model {
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
