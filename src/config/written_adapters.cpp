#include <algorithm>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ballast/config/adapter_folder.h"
#include "ballast/core/error.h"
#include "ballast/model/architecture.h"
#include "ballast/model/family.h"
#include "ballast/text/json.h"

#include "src/config/adapter_config.h"
#include "src/config/key.h"

// Makes the adapter_config.json of the adapters of a model.

namespace ballast::config {

namespace {

namespace fs = std::filesystem;
using text::Json;

/// The version of PEFT whose meaning the folders have that Ballast writes.
constexpr const char* kPeftVersion = "0.21.2";

bool has_own_name(const std::vector<std::string>& list, std::string_view name) {
  return std::find(list.begin(), list.end(), name) != list.end();
}

/// The modules whose tensors are trained in full.
std::vector<std::string> trained_modules(const model::Architecture& model) {
  std::vector<std::string> modules;
  for (const model::BlockSpec& block : model.blocks) {
    for (const model::TensorSpec& tensor : block.tensors) {
      if (tensor.frozen || tensor.adapter) continue;
      std::string module = tensor.name.substr(0, tensor.name.rfind('.'));
      if (!has_own_name(modules, module)) modules.push_back(std::move(module));
    }
  }
  return modules;
}

/// The modules with adapters.
std::vector<std::string> adapted_modules(const model::Architecture& model) {
  std::vector<std::string> modules;
  for (const model::BlockSpec& block : model.blocks) {
    for (const model::TensorSpec& tensor : block.tensors) {
      if (!tensor.adapter || !tensor.name.ends_with(model::kFirstOfAdapter)) continue;
      modules.push_back(tensor.name.substr(0, tensor.name.size() - model::kFirstOfAdapter.size()));
    }
  }
  return modules;
}

/// Whether routers, shared or routed experts have adapters.
bool has_adapted_experts(const model::Architecture& model) {
  return std::ranges::any_of(model.blocks, [](const model::BlockSpec& block) {
    return std::ranges::any_of(block.tensors, [](const model::TensorSpec& tensor) {
      return !tensor.name_in_files.empty();
    });
  });
}

/// Whether the last parts of the adapted modules' names also name maps of experts.
bool has_ambiguous_targets(const model::Architecture& model) {
  const bool experts = std::ranges::any_of(model.blocks, [](const model::BlockSpec& block) {
    return block.content == model::BlockContent::router;
  });
  return experts && std::ranges::any_of(adapted_modules(model), is_named_like_expert);
}

/// The model_type of the model at `base`, or the one of folders that Ballast writes.
std::string type_over(const model::Architecture& model, const fs::path& base) {
  std::string type = type_of_base(base);
  if (!type.empty()) return type;
  return std::string(model::family(model.config.family).checkpoint_type());
}

/// A module or parameter with an adapter.
struct AdaptedName {
  std::string module;   ///< the name for which ranks and alphas are looked up
  std::string written;  ///< in the class for which the folder is written
  bool parameter = false;
};

/// Returns the modules of a model with experts, as a folder names them: routers, maps of shared
/// experts and of dense layers are parameters, which PEFT does not confuse with maps of experts.
std::vector<AdaptedName> names_beside_experts(const model::Architecture& model,
                                              const std::string& prefix) {
  std::vector<AdaptedName> names;
  for (const model::BlockSpec& block : model.blocks) {
    for (const model::TensorSpec& tensor : block.tensors) {
      if (!tensor.adapter || !tensor.name.ends_with(model::kFirstOfAdapter)) continue;
      const std::string module =
          tensor.name.substr(0, tensor.name.size() - model::kFirstOfAdapter.size());
      const std::string& file = tensor.name_in_files;
      const bool expert = block.content == model::BlockContent::expert;
      if (expert && file != tensor.name) {
        if (tensor.first_element() > 0) continue;
        names.push_back({module, name_in_class(module, prefix), true});
        continue;
      }
      const std::string own =
          file.empty() ? module : file.substr(0, file.size() - model::kFirstOfAdapter.size());
      const bool parameter = !expert && (!file.empty() || is_named_like_expert(module));
      names.push_back(
          {module, name_in_class(own, prefix) + std::string(parameter ? kWeight : ""), parameter});
    }
  }
  return names;
}

std::vector<AdaptedName> names_of(const model::Architecture& model, const std::string& prefix,
                                  bool parameters) {
  if (has_adapted_experts(model)) return names_beside_experts(model, prefix);
  std::vector<AdaptedName> names;
  for (const std::string& module : adapted_modules(model)) {
    const bool parameter = parameters && is_named_like_expert(module);
    names.push_back(
        {module, name_in_class(module, prefix) + std::string(parameter ? kWeight : ""), parameter});
  }
  return names;
}

/// Writes the patterns of `model`, for folders that list each adapted module by its name there:
/// those of modules whose numbers differ from the ones of all.
void write_named_patterns(Json& json, const model::Architecture& model,
                          const std::vector<AdaptedName>& names) {
  const model::AdapterConfig& adapters = *model.adapters;
  model::ModulePatterns ranks;
  model::ModulePatterns alphas;
  for (const AdaptedName& name : names) {
    const auto rank = static_cast<double>(adapters.rank_of(name.module));
    const double alpha = adapters.alpha_of(name.module);
    if (adapters.rank_of(name.module) != adapters.rank) {
      expects(ranks.add(name.written, rank), "a plain name");
    }
    if (alpha != adapters.alpha) expects(alphas.add(name.written, alpha), "a plain name");
  }
  json[kRankPattern] = write_patterns(ranks);
  json[kAlphaPattern] = write_patterns(alphas);
}

/// Sets target_modules and target_parameters for names_beside_experts(). Maps of single experts are
/// named by their last parts, because there are many.
void write_targets(Json& json, const std::vector<AdaptedName>& names) {
  std::vector<std::string> modules;
  std::vector<std::string> parameters;
  for (const AdaptedName& name : names) {
    const bool single = !name.parameter && is_of_expert(name.written);
    std::string own = single ? name.written.substr(name.written.rfind('.') + 1) : name.written;
    std::vector<std::string>& list = name.parameter ? parameters : modules;
    if (!single || !has_own_name(list, own)) list.push_back(std::move(own));
  }
  json["target_modules"] = list_of(modules);
  json[kTargetParameters] = list_of(parameters);
}

}  // namespace

Json make_adapter_config(const model::Architecture& model, const fs::path& base,
                         const std::string& prefix) {
  expects(model.adapters.has_value(), "the model has no adapters");
  const model::AdapterConfig& adapters = *model.adapters;
  std::vector<std::string> modules = trained_modules(model);
  std::vector<std::string> targets = adapters.targets;
  const bool experts = has_adapted_experts(model);
  const bool named = prefix != kModulePrefix || experts || has_ambiguous_targets(model);
  if (named) targets = adapted_modules(model);
  for (std::string& name : targets) name = name_in_class(name, prefix);
  for (std::string& name : modules) name = name_in_class(name, prefix);
  Json json =
      Json::object({{"peft_type", "LORA"},
                    {"task_type", "CAUSAL_LM"},
                    {"base_model_name_or_path", base.empty() ? Json() : Json(base.string())},
                    {"r", adapters.rank},
                    {"lora_alpha", adapters.alpha},
                    {kRankPattern, write_patterns(adapters.rank_pattern)},
                    {kAlphaPattern, write_patterns(adapters.alpha_pattern)},
                    {"lora_dropout", adapters.dropout},
                    {"use_rslora", adapters.rslora},
                    {"use_dora", adapters.dora},
                    {"target_modules", list_of(targets)},
                    {"modules_to_save", modules.empty() ? Json() : list_of(modules)},
                    {"fan_in_fan_out", adapters.input_first},
                    {"bias", "none"},
                    {"init_lora_weights", true},
                    {"inference_mode", true}});
  const bool parameters =
      !adapters.dora && !experts && needs_parameters(type_over(model, base), targets);
  if (parameters) set_targets(json, targets);
  const std::vector<AdaptedName> names = names_of(model, prefix, parameters);
  if (experts) {
    write_targets(json, names);
    // The order of the columns of B depends on it.
    json["peft_version"] = kPeftVersion;
  }
  if (named || parameters) write_named_patterns(json, model, names);
  return json;
}

std::string note_about_peft(const model::Architecture& model, const fs::path& base) {
  if (!model.adapters) return "";
  const std::vector<std::string> modules = adapted_modules(model);
  if (has_adapted_experts(model)) return note_about_experts(modules, model.adapters->rslora);
  return note_about_targets(type_over(model, base), modules, model.adapters->dora,
                            model.adapters->dropout);
}

}  // namespace ballast::config
