#include "src/config/rope_keys.h"

#include <fmt/format.h>

#include "ballast/core/error.h"

#include "src/config/json_values.h"

namespace ballast::config {
namespace {

using text::Json;

constexpr const char* kTheta = "rope_theta";
constexpr const char* kScaling = "rope_scaling";
constexpr const char* kBoth = "rope_parameters";
constexpr const char* kType = "rope_type";
constexpr const char* kTrained = "original_max_position_embeddings";
constexpr const char* kLongest = "max_position_embeddings";

/// Splits rope_parameters into rope_theta and rope_scaling.
void split_parameters(Json& json, const std::string& file) {
  const Json* const given = find_given(json, kBoth);
  if (given == nullptr || !given->is_object()) return;
  Json scaling = *given;
  if (const Json* const theta = find_given(scaling, kTheta)) {
    const Json* const other = find_given(json, kTheta);
    if (other != nullptr && !are_equal(*other, *theta)) {
      throw Error(ErrorCategory::config,
                  fmt::format("{}: {}.{} is {}, but another key says {}", file, kBoth, kTheta,
                              theta->compact(), other->compact()));
    }
    json[kTheta] = Json(*theta);
    scaling.erase(kTheta);
  }
  json.erase(kBoth);
  json[kScaling] = std::move(scaling);
}

/// The type first, under its new name.
Json with_type(const Json& scaling) {
  const Json* type = find_given(scaling, kType);
  if (type == nullptr) type = find_given(scaling, "type");
  Json out = Json::object();
  if (type != nullptr) out[kType] = *type == "su" ? Json("longrope") : *type;
  for (const auto& [key, value, at] : scaling.members()) {
    if (key != kType && key != "type" && !value.is_null()) out[key] = value;
  }
  return out;
}

/// Adds what the type takes from the keys beside rope_scaling.
void fill_in(Json& scaling, const Json& json) {
  const Json* const type = scaling.find(kType);
  if (type == nullptr) return;
  const Json* const longest = find_given(json, kLongest);
  const bool is_long = *type == "longrope";
  if (!is_long && !(*type == "dynamic") && !(*type == "yarn")) return;
  if (scaling.find(kTrained) == nullptr) {
    const Json* const beside = find_given(json, kTrained);
    const Json* const trained = beside != nullptr ? beside : longest;
    if (trained != nullptr) scaling[kTrained] = Json(*trained);
  }
  const Json* const trained = scaling.find(kTrained);
  if (!is_long || scaling.find("factor") != nullptr || longest == nullptr || trained == nullptr) {
    return;
  }
  if (longest->is_number() && trained->is_number() && trained->number() > 0.0) {
    scaling["factor"] = longest->number() / trained->number();
  }
}

}  // namespace

Json with_rope_keys(Json json, const std::string& file) {
  split_parameters(json, file);
  if (const Json* const given = find_given(json, kScaling);
      given != nullptr && given->is_object()) {
    Json scaling = with_type(*given);
    fill_in(scaling, json);
    const bool plain = scaling.members().size() == 1 && scaling.members()[0].value == "default";
    json[kScaling] = plain ? Json() : std::move(scaling);
    json.erase(kTrained);
  }
  return json;
}

}  // namespace ballast::config
