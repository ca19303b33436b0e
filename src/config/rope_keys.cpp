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
constexpr const char* kLocal = "sliding_attention";
constexpr const char* kGlobal = "full_attention";
constexpr const char* kLocalTheta = "rope_local_base_freq";
constexpr const char* kTrained = "original_max_position_embeddings";
constexpr const char* kLongest = "max_position_embeddings";

/// Moves rope_theta from `parameters` (`name` in the file) to `key`.
void move_theta(Json& parameters, const std::string& name, const char* key, Json& json,
                const std::string& file) {
  const Json* const theta = find_given(parameters, kTheta);
  if (theta == nullptr) return;
  const Json* const other = find_given(json, key);
  if (other != nullptr && !are_equal(*other, *theta)) {
    throw Error(ErrorCategory::config,
                fmt::format("{}: {}.{} is {}, but another key says {}", file, name, kTheta,
                            theta->compact(), other->compact()));
  }
  json[key] = Json(*theta);
  parameters.erase(kTheta);
}

/// Those of layers with a window, which can only have another base.
void split_local_parameters(Json parameters, Json& json, const std::string& file) {
  const std::string name = fmt::format("{}.{}", kBoth, kLocal);
  move_theta(parameters, name, kLocalTheta, json, file);
  for (const auto& [key, value, at] : parameters.members()) {
    if (value.is_null() || (key == kType && value == "default")) continue;
    throw Error(ErrorCategory::config,
                fmt::format("{}: {}.{} is {}, but Ballast scales only the rotary positions of "
                            "layers without a window; give the weights of another model",
                            file, name, key, text::printable(value.compact())));
  }
}

/// Splits rope_parameters into rope_theta and rope_scaling. They may be given by type of layer.
void split_parameters(Json& json, const std::string& file) {
  const Json* const given = find_given(json, kBoth);
  if (given == nullptr || !given->is_object()) return;
  Json scaling = *given;
  std::string name = kBoth;
  if (const Json* const local = find_given(scaling, kLocal)) {
    split_local_parameters(*local, json, file);
    scaling.erase(kLocal);
  }
  if (const Json* const global = find_given(scaling, kGlobal)) {
    name = fmt::format("{}.{}", kBoth, kGlobal);
    scaling = Json(*global);
  }
  move_theta(scaling, name, kTheta, json, file);
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
