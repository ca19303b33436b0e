#include "src/config/adapter_config.h"

#include <algorithm>
#include <system_error>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/model/family.h"
#include "ballast/text/files.h"
#include "ballast/text/json.h"

#include "src/model/description/layer_rules.h"

namespace ballast::config {

namespace {

namespace fs = std::filesystem;
using model::kStackedDown;
using model::kStackedGateUp;
using text::Json;

/// Names that PEFT replaces.
constexpr std::string_view kMapsOfExperts = "gate_proj up_proj down_proj";
constexpr const char* kModelConfig = "config.json";

/// Returns whether PEFT converts the names of maps in models of this type.
bool is_converted(std::string_view type) {
  return std::ranges::any_of(model::family_names(), [&](const std::string& name) {
    const model::Family& family = model::family(name);
    return family.checkpoint_type() == type && family.checkpoint_rules().peft_converts;
  });
}

}  // namespace

model::ModulePatterns read_patterns(const Json& value, std::string_view key,
                                    const std::function<void(const std::string& rule)>& fail) {
  model::ModulePatterns patterns;
  if (value.is_null()) return patterns;
  if (!value.is_object()) fail("an object is expected");
  for (const auto& [pattern, number, at] : value.members()) {
    const bool ranks = key == kRankPattern;
    const bool valid =
        ranks ? number.whole().value_or(0) > 0 : number.is_number() && number.number() > 0.0;
    if (!valid) {
      fail(fmt::format("its values must be {} above 0", ranks ? "whole numbers" : "numbers"));
    }
    if (!patterns.add(pattern, number.number())) {
      fail(
          fmt::format("Ballast cannot read the regular expression '{}'; write the names of the "
                      "modules out",
                      text::printable(pattern)));
    }
  }
  return patterns;
}

Json write_patterns(const model::ModulePatterns& patterns) {
  Json written = Json::object();
  for (const model::ModulePatterns::Row& row : patterns.rows()) {
    const auto whole = static_cast<std::uint64_t>(row.value);
    const bool is_whole = static_cast<double>(whole) == row.value;
    written.add(row.pattern, is_whole ? Json(whole) : Json(row.value));
  }
  return written;
}

std::string type_of_base(const fs::path& weights) {
  std::error_code ignored;
  const fs::path folder = fs::is_directory(weights, ignored) ? weights : weights.parent_path();
  const fs::path file = folder / kModelConfig;
  if (weights.empty() || !fs::exists(file, ignored)) return "";
  try {
    // The file may be a config of Ballast.
    const Json json = text::parse_json(text::read_settings(file, "model"), file.string(),
                                       {.comments = true, .non_finite = true});
    const Json* const type = json.find("model_type");
    return type != nullptr && type->is_string() ? type->text() : "";
  } catch (const Error&) {
    return "";
  }
}

bool is_named_like_expert(std::string_view module) {
  return text::has_word(kMapsOfExperts, module.substr(module.rfind('.') + 1));
}

bool is_of_expert(std::string_view module) {
  return module.find(".experts.") != std::string_view::npos;
}

bool needs_parameters(std::string_view type, const std::vector<std::string>& modules) {
  return is_converted(type) && std::ranges::any_of(modules, is_named_like_expert) &&
         std::ranges::none_of(modules, is_of_expert);
}

void set_targets(Json& settings, const std::vector<std::string>& modules) {
  Json others = Json::array();
  Json parameters = Json::array();
  for (const std::string& module : modules) {
    if (is_named_like_expert(module)) {
      parameters.push_back(module + std::string(kWeight));
    } else {
      others.push_back(module);
    }
  }
  settings["target_modules"] = std::move(others);
  settings[kTargetParameters] = std::move(parameters);
  settings["lora_dropout"] = 0.0;
}

std::vector<std::string> modules_of_parameters(const std::string& file, const Json& parameters) {
  std::vector<std::string> modules;
  for (const Json& parameter : parameters.elements()) {
    const std::string& name = parameter.text();
    if (parameter.is_string() && name.size() > kWeight.size() && name.ends_with(kWeight)) {
      modules.push_back(name.substr(0, name.size() - kWeight.size()));
      continue;
    }
    const std::string last = name.substr(name.rfind('.') + 1);
    if (parameter.is_string() && (last == kStackedGateUp || last == kStackedDown)) {
      // "down_proj" alone also names maps of dense layers in ballast.adapters.targets.
      modules.push_back(name == kStackedDown ? fmt::format("experts.{}", name) : name);
      continue;
    }
    refuse_adapters(file, kTargetParameters, parameters,
                    "Ballast has adapters of weights of linear maps "
                    "(\"model.layers.0.mlp.up_proj.weight\") and of the maps of experts "
                    "(\"experts.gate_up_proj\", \"experts.down_proj\"), and of no other "
                    "parameters");
  }
  return modules;
}

std::string note_about_targets(std::string_view type, const std::vector<std::string>& modules,
                               bool dora, double dropout) {
  if (!needs_parameters(type, modules)) return "";
  if (dora) {
    return fmt::format(
        "PEFT 0.21 with transformers 5 cannot load DoRA of gate_proj, up_proj and down_proj in the "
        "dense layers of a {} model, since it takes them for maps of experts; export such adapters "
        "with --merged",
        type);
  }
  if (dropout == 0.0) return "";
  return fmt::format(
      "lora_dropout in adapter_config.json is 0 instead of {}: dense layers of a {} model must be "
      "in "
      "target_parameters, for which PEFT has no dropout",
      dropout, type);
}

std::string note_about_experts(const std::vector<std::string>& modules, bool rslora) {
  const auto is_single = [](const std::string& module) {
    return is_of_expert(module) && !module.ends_with(kStackedGateUp) &&
           !module.ends_with(fmt::format("experts.{}", kStackedDown));
  };
  if (std::ranges::none_of(modules, is_single)) return "";
  std::string note =
      "these adapters are of single experts' maps, which PEFT with transformers 5 converts for "
      "most "
      "families when it loads them";
  if (rslora) note += ", with a scale of gate and up that is sqrt(2) too large (rsLoRA)";
  return note + "; ballast export --merged merges them rightly";
}

}  // namespace ballast::config
