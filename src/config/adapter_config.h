#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/model/lora.h"
#include "ballast/text/json.h"

namespace ballast::config {

/// Throws Error(config): "FILE: KEY is VALUE, but RULE".
[[noreturn]] void refuse_adapters(const std::string& file, std::string_view key,
                                  const text::Json& value, std::string_view rule);

/// Keys of LoraConfig and of ballast.adapters.
inline constexpr const char* kRankPattern = "rank_pattern";
inline constexpr const char* kAlphaPattern = "alpha_pattern";
/// End of the name of a map's weights.
inline constexpr std::string_view kWeight = ".weight";

/// Reads patterns for names of modules and the numbers for such modules: an object, or null for
/// none. `key`: one of the two above. Calls `fail` with the rule that the value breaks.
model::ModulePatterns read_patterns(const text::Json& value, std::string_view key,
                                    const std::function<void(const std::string& rule)>& fail);
text::Json write_patterns(const model::ModulePatterns& patterns);

/// Whether a value of LoraConfig means the same as a missing key.
bool has_no_value(const text::Json& value);

/// Adapters that begin as parts of the base model, which does not change. B is never trained.
inline constexpr const char* kMica = "mica";

/// Refuses a description of adapters other than LoRA.
void check_adapter_type(const std::string& file, const text::Json& json);

/// Refuses a key of LoraConfig that changes what the adapters compute, if Ballast has no key for
/// it.
void check_adapter_key(const std::string& file, const std::string& key, const text::Json& value);

/// Refuses a value of init_lora_weights for which PEFT changes the base model, too.
void check_beginning(const std::string& file, const text::Json& value);

}  // namespace ballast::config

// How an adapter_config.json names the maps that have adapters. Usually target_modules lists them.
// For some types of models, PEFT 0.21 with transformers 5
// (peft/utils/transformers_weight_conversion.py) replaces gate_proj, up_proj and down_proj in
// target_modules by the stacked maps of the experts, however target_modules spells them. It then
// does not load the adapters of dense layers. target_parameters, which PEFT has since version 0.17,
// names the weights of these maps instead, and the adapters compute the same.

namespace ballast::config {

inline constexpr const char* kTargetParameters = "target_parameters";

/// The model_type of the config.json next to a base model's weights, a file or folder; "" if there
/// is none.
std::string type_of_base(const std::filesystem::path& weights);

/// Whether the module or parameter belongs to routed experts.
bool is_of_expert(std::string_view module);

/// Whether the module has a name that experts' maps have, too.
bool is_named_like_expert(std::string_view module);

/// Whether PEFT would take some of the modules, which are maps of attention and of dense MLPs, for
/// maps of experts if target_modules named them. False for adapters of experts themselves, which
/// PEFT converts. `type`: model_type of the base's config.json.
bool needs_parameters(std::string_view type, const std::vector<std::string>& modules);

/// Names the modules in `settings`, an adapter_config.json: those that PEFT takes for experts in
/// target_parameters, the others in target_modules. Sets lora_dropout to 0, since PEFT has no
/// dropout for target_parameters.
void set_targets(text::Json& settings, const std::vector<std::string>& modules);

/// Returns the modules whose weights `parameters`, a value of target_parameters, names, and the
/// parameters that hold the maps of all experts. Throws Error(config) naming `file` for any others.
std::vector<std::string> modules_of_parameters(const std::string& file,
                                               const text::Json& parameters);

/// Returns one line about the difference between adapters in training and what PEFT loads from
/// their folder; "" if there is none.
std::string note_about_targets(std::string_view type, const std::vector<std::string>& modules,
                               bool dora, double dropout);

/// Returns one line about what PEFT makes of adapters of single experts' maps; "" for adapters of
/// all experts of a layer together, which it loads rightly.
std::string note_about_experts(const std::vector<std::string>& modules, bool rslora);

}  // namespace ballast::config
