#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "ballast/model/architecture.h"
#include "ballast/text/json.h"

namespace ballast::config {

// PEFT folders (PEFT is Hugging Face's library of adapters): adapter_config.json describes the
// adapters, and adapter_model.safetensors contains the tensors, each NAME as kAdapterPrefix + NAME.

inline constexpr const char* kAdapterConfig = "adapter_config.json";
inline constexpr const char* kAdapterWeights = "adapter_model.safetensors";
inline constexpr const char* kAdapterPrefix = "base_model.model.";
/// Beginning of the modules' names in classes of text models.
inline constexpr const char* kModulePrefix = "model.";

/// The keys of ballast.adapters that the adapter_config.json in `folder` describes, all except
/// path. Modules of a text model in a model of text and images have the names of the text model
/// alone. Throws Error(config) naming the file and the key: no such file, another kind of adapter,
/// and a setting that changes what adapters compute and that Ballast lacks.
text::Json read_adapter_folder(const std::filesystem::path& folder);

/// The settings of an adapter_config.json that merging needs. The tensors themselves show which
/// modules have adapters, and with which rank.
struct MergeSettings : model::AdapterConfig {
  /// Ids of the tokens whose rows are trained, by module; "" is the embedding.
  std::vector<std::pair<std::string, std::vector<std::uint64_t>>> tokens;
  /// Modules and parameters that target_parameters names, without ".weight".
  std::vector<std::string> parameters;

  /// nullptr if the config names no tokens of `module`.
  [[nodiscard]] const std::vector<std::uint64_t>* tokens_of(const std::string& module) const;
};

/// Throws Error(config) naming the file and the key: no such file, another kind of adapter,
/// adapters of a base model that PEFT has changed, and a setting that changes merged weights and
/// that Ballast lacks.
MergeSettings read_merge_settings(const std::filesystem::path& folder);

/// Makes adapter_config.json for the adapters of `model` over the model at `base` (empty: unknown).
/// `prefix`: see module_prefix(). Modules are listed one by one if other modules of the class may
/// have the same last names: in a model of text and images, and in dense layers of a model with
/// experts. Where PEFT 0.21 would take the latter for experts, target_parameters names their
/// weights (src/config/adapter_config.h).
text::Json make_adapter_config(const model::Architecture& model, const std::filesystem::path& base,
                               const std::string& prefix = kModulePrefix);

/// Returns one line about what PEFT cannot load from the folder of these adapters, or what their
/// adapter_config.json does not say; "" if there is nothing. `base`: as for make_adapter_config().
std::string note_about_peft(const model::Architecture& model, const std::filesystem::path& base);

/// An adapter_config.json, and a line like that of note_about_peft().
struct RespeltAdapters {
  std::string text;
  std::string note;
};
/// Returns the adapter_config.json `text` of adapters of `modules`, whose names are those of the
/// class, as make_adapter_config() names them. Earlier versions of Ballast, and of PEFT, named all
/// in target_modules. The text is unchanged if its base model is not there, or if it has rules that
/// depend on the names of modules, such as rank_pattern.
RespeltAdapters respell_adapters(const std::string& text, const std::vector<std::string>& modules);

/// The name of a module or tensor `name` of a text model in a class with this module_prefix().
std::string name_in_class(const std::string& name, const std::string& prefix);

}  // namespace ballast::config
