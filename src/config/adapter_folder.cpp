#include "ballast/config/adapter_folder.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <regex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/config/stored_model.h"
#include "ballast/core/error.h"
#include "ballast/model/family.h"
#include "ballast/text/files.h"
#include "ballast/text/json.h"

#include "src/config/adapter_config.h"
#include "src/config/key.h"

namespace ballast::config {

namespace {

namespace fs = std::filesystem;
using text::Json;

/// Keys of LoraConfig and those of ballast.adapters with the same value.
constexpr std::array<std::pair<const char*, const char*>, 9> kSame = {
    {{"r", "rank"},
     {"lora_alpha", "alpha"},
     {kRankPattern, kRankPattern},
     {kAlphaPattern, kAlphaPattern},
     {"lora_dropout", "dropout"},
     {"use_rslora", "rslora"},
     {"use_dora", "dora"},
     {"target_modules", "targets"},
     {"modules_to_save", "modules_to_save"}}};

/// Keys that do not change what saved adapters compute.
constexpr std::string_view kIgnoredKeys =
    "auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config "
    "fan_in_fan_out inference_mode loftq_config lora_B_layout lora_ga_config megatron_core "
    "monteclora_config "
    "peft_version qalora_group_size revision runtime_config task_type";

/// Kinds of initial values that do not change the weights of the model.
constexpr std::array kPlainBeginnings = {"true", "false", "gaussian", "eva", "orthogonal"};

template <class List>
bool has_name(const List& list, std::string_view name) {
  return std::find(list.begin(), list.end(), name) != list.end();
}

/// Refuses a value of kSame whose type is not that of LoraConfig.
void check_type(const std::string& file, std::string_view key, const Json& value) {
  const bool number = key == "r" || key.starts_with("lora_");
  if (number && !value.is_number()) refuse_adapters(file, key, value, "a number is expected");
  const bool flag = key.starts_with("use_");
  if (flag && !value.is_boolean()) refuse_adapters(file, key, value, "a flag is expected");
  const bool patterns = key == kRankPattern || key == kAlphaPattern;
  if (patterns && !value.is_object()) refuse_adapters(file, key, value, "an object is expected");
  if (number || flag || patterns || value.is_string()) return;
  const auto& names = value.elements();
  const bool list =
      value.is_array() &&
      std::all_of(names.begin(), names.end(), [](const Json& name) { return name.is_string(); });
  if (!list) refuse_adapters(file, key, value, "a list of names is expected");
}

Json names_in_text_model(const Json& names) {
  Json list = Json::array();
  for (const Json& name : names.elements()) list.push_back(name_in_text_model(name.text()));
  return list;
}

/// Patterns that are names of modules, or of the weights that target_parameters names.
Json patterns_in_text_model(const Json& patterns) {
  Json renamed = Json::object();
  for (const auto& [pattern, value, at] : patterns.members()) {
    const bool weight = pattern.ends_with(kWeight);
    const std::string name = weight ? pattern.substr(0, pattern.size() - kWeight.size()) : pattern;
    renamed.add(name_in_text_model(name), value);
  }
  return renamed;
}

/// Adds the modules that target_parameters names to the targets.
void add_parameters(const std::string& file, const Json& json, Json& section) {
  constexpr const char* kTargets = "targets";
  const Json* const parameters = json.find(kTargetParameters);
  if (parameters == nullptr || has_no_value(*parameters)) return;
  if (section.find(kTargets) == nullptr) section.add(kTargets, Json::array());
  for (const std::string& module : modules_of_parameters(file, *parameters)) {
    section[kTargets].push_back(name_in_text_model(module));
  }
}

}  // namespace

bool has_no_value(const Json& value) {
  return value.is_null() || (value.is_boolean() && !value.flag()) ||
         (value.is_object() && value.members().empty()) ||
         (value.is_array() && value.elements().empty());
}

void refuse_adapters(const std::string& file, std::string_view key, const Json& value,
                     std::string_view rule) {
  constexpr std::size_t kLongest = 60;
  throw Error(ErrorCategory::config, fmt::format("{}: {} is {}, but {}", file, text::printable(key),
                                                 text::printable(value.compact(), kLongest), rule));
}

void check_adapter_type(const std::string& file, const Json& json) {
  constexpr const char* kType = "peft_type";
  const Json* const type = json.find(kType);
  if (type == nullptr || *type == "LORA") return;
  refuse_adapters(file, kType, *type,
                  "Ballast has only adapters of type \"LORA\"; merge these with PEFT");
}

void check_adapter_key(const std::string& file, const std::string& key, const Json& value) {
  if (key == "peft_type") return;  // see check_adapter_type()
  if (has_no_value(value) || text::has_word(kIgnoredKeys, key)) return;
  refuse_adapters(file, key, value,
                  "Ballast has no such adapters; give a folder of LoRA without this setting");
}

void check_beginning(const std::string& file, const Json& value) {
  if (value.is_null() || has_name(kPlainBeginnings, value.text())) return;
  refuse_adapters(file, "init_lora_weights", value,
                  "such adapters belong to a changed base model; convert them to plain LoRA with "
                  "PEFT (save_pretrained with path_initial_model_for_weight_conversion)");
}

namespace {

/// Refuses a key that changes what is trained and has no equivalent in ballast.adapters.
void check_trained_key(const std::string& file, const std::string& key, const Json& value) {
  constexpr std::array kSelections = {"exclude_modules", "layers_pattern", "layers_to_transform"};
  if (key == "bias" && !(value == "none")) {
    refuse_adapters(file, key, value,
                    "training with adapters trains no biases; only \"none\" is supported");
  }
  if (key == "init_lora_weights") {
    if (value == kMica) {
      refuse_adapters(file, key, value,
                      "PEFT trains only one matrix of such adapters; merge these with ballast "
                      "export --merged and train new ones over the result");
    }
    return check_beginning(file, value);
  }
  if (key == "bias" || key == kTargetParameters || has_no_value(value)) return;
  if (has_name(kSelections, key)) {
    refuse_adapters(file, key, value,
                    "Ballast trains the maps that target_modules lists; list their full names "
                    "there (\"model.layers.0.self_attn.q_proj\") and set this to null");
  }
  check_adapter_key(file, key, value);
}

}  // namespace

Json read_adapter_folder(const fs::path& folder) {
  const fs::path path = folder / kAdapterConfig;
  const std::string file = path.string();
  const Json json = text::parse_json(text::read_settings(path, "adapters"), file);
  check_adapter_type(file, json);
  Json section = Json::object();
  for (const auto& [theirs, own] : kSame) {
    const Json* const value = json.find(theirs);
    if (value == nullptr || value->is_null()) continue;
    const bool pattern =
        own == std::string_view("targets") && value->is_string() && !(*value == model::kAllLinear);
    if (pattern) {
      refuse_adapters(file, theirs, *value,
                      "training reads only lists of names and \"all-linear\"; list the maps, or "
                      "their full names (\"model.layers.0.self_attn.q_proj\")");
    }
    check_type(file, theirs, *value);
    if (value->is_array()) {
      section.add(own, names_in_text_model(*value));
    } else if (value->is_object()) {
      if (!value->members().empty()) section.add(own, patterns_in_text_model(*value));
    } else {
      section.add(own, value->is_string() ? Json::array({*value}) : *value);
    }
  }
  for (const auto& member : json.members()) {
    const bool same = std::any_of(kSame.begin(), kSame.end(),
                                  [&](const auto& pair) { return pair.first == member.key; });
    if (!same) check_trained_key(file, member.key, member.value);
  }
  add_parameters(file, json, section);
  return section;
}

std::string name_in_class(const std::string& name, const std::string& prefix) {
  if (!name.starts_with(kModulePrefix)) return name;
  return prefix + name.substr(std::string_view(kModulePrefix).size());
}

RespeltAdapters respell_adapters(const std::string& text, const std::vector<std::string>& modules) {
  constexpr std::array kRules = {kAlphaPattern,    "exclude_modules",     "fan_in_fan_out",
                                 "layers_pattern", "layers_to_transform", "lora_bias",
                                 kRankPattern,     kTargetParameters};
  Json json = text::parse_json(text, kAdapterConfig, {.category = ErrorCategory::data});
  const auto value_of = [&json](const char* key) {
    const Json* const found = json.find(key);
    return found == nullptr ? Json() : *found;
  };
  const std::string type = type_of_base(value_of("base_model_name_or_path").text());
  const auto has_rule = [&](const char* key) { return !has_no_value(value_of(key)); };
  if (!needs_parameters(type, modules) || std::ranges::any_of(kRules, has_rule)) return {text, ""};
  const bool dora = value_of("use_dora").flag();
  const Json dropout = value_of("lora_dropout");
  const double rate = dropout.is_number() ? dropout.number() : 0.0;
  if (!dora) set_targets(json, modules);
  return {dora ? text : json.pretty() + "\n", note_about_targets(type, modules, dora, rate)};
}

namespace {

namespace fs = std::filesystem;

/// Keys of LoraConfig that determine which modules are trained, or how. The tensors show the
/// result.
constexpr std::array kShownByTensors = {
    "bias",      "exclude_modules", "init_lora_weights", "layers_pattern", "layers_to_transform",
    "lora_bias", "lora_dropout",    "modules_to_save",   "target_modules", "velora_config"};

std::vector<std::uint64_t> read_tokens(const std::string& file, const Json& whole,
                                       const Json& list) {
  std::vector<std::uint64_t> tokens;
  for (const Json& token : list.elements()) tokens.push_back(token.whole().value_or(~0ULL));
  const bool valid = list.is_array() &&
                     std::none_of(tokens.begin(), tokens.end(), [](auto t) { return t == ~0ULL; });
  if (!valid) {
    refuse_adapters(file, "trainable_token_indices", whole, "lists of ids of tokens are expected");
  }
  return tokens;
}

void read_tokens(const std::string& file, const Json& json, MergeSettings& settings) {
  const Json* const found = json.find("trainable_token_indices");
  if (found == nullptr || found->is_null()) return;
  if (!found->is_object()) {
    settings.tokens.emplace_back("", read_tokens(file, *found, *found));
    return;
  }
  for (const auto& [module, list, at] : found->members()) {
    settings.tokens.emplace_back(module, read_tokens(file, *found, list));
  }
}

double number_of(const std::string& file, const Json& json, std::string_view key, double standard) {
  const Json* const found = json.find(key);
  if (found == nullptr || found->is_null()) return standard;
  if (!found->is_number()) refuse_adapters(file, key, *found, "a number is expected");
  return found->number();
}

bool flag_of(const std::string& file, const Json& json, std::string_view key) {
  const Json* const found = json.find(key);
  if (found == nullptr || found->is_null()) return false;
  if (!found->is_boolean()) refuse_adapters(file, key, *found, "a flag is expected");
  return found->flag();
}

}  // namespace

const std::vector<std::uint64_t>* MergeSettings::tokens_of(const std::string& module) const {
  for (const auto& [name, list] : tokens) {
    const bool fits = name.empty() || module == name || module.ends_with("." + name);
    if (fits) return &list;
  }
  return nullptr;
}

MergeSettings read_merge_settings(const fs::path& folder) {
  const fs::path path = folder / kAdapterConfig;
  const std::string file = path.string();
  const Json json = text::parse_json(text::read_settings(path, "adapters"), file);
  check_adapter_type(file, json);
  constexpr std::array kRead = {"r",
                                "lora_alpha",
                                "use_rslora",
                                "use_dora",
                                kRankPattern,
                                kAlphaPattern,
                                "trainable_token_indices"};
  const auto is_one_of = [](const auto& list, const std::string& key) {
    return std::find(list.begin(), list.end(), key) != list.end();
  };
  MergeSettings settings;
  for (const auto& [key, value, at] : json.members()) {
    if (key == "init_lora_weights" && !(value == kMica)) check_beginning(file, value);
    if (is_one_of(kRead, key) || is_one_of(kShownByTensors, key)) continue;
    if (key == kTargetParameters) {
      settings.parameters = modules_of_parameters(file, value);
      continue;
    }
    check_adapter_key(file, key, value);
  }
  if (const Json* const rank = json.find("r"); rank != nullptr && !rank->is_null()) {
    if (!rank->whole()) refuse_adapters(file, "r", *rank, "a whole number is expected");
    settings.rank = *rank->whole();
  }
  settings.alpha = number_of(file, json, "lora_alpha", settings.alpha);
  settings.rslora = flag_of(file, json, "use_rslora");
  settings.dora = flag_of(file, json, "use_dora");
  settings.input_first = flag_of(file, json, "fan_in_fan_out");
  const auto patterns = [&](const char* key) {
    const Json* const found = json.find(key);
    const bool none = found == nullptr || !found->is_object();
    const Json given = found == nullptr ? Json() : none ? *found : patterns_in_text_model(*found);
    return read_patterns(given, key,
                         [&](const std::string& rule) { refuse_adapters(file, key, given, rule); });
  };
  settings.rank_pattern = patterns(kRankPattern);
  settings.alpha_pattern = patterns(kAlphaPattern);
  read_tokens(file, json, settings);
  return settings;
}

}  // namespace ballast::config
