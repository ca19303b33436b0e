#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/config/config.h"

namespace ballast::config {

/// The effect of a key on a run that resumes.
enum class KeyRole : std::uint8_t {
  mathematics,  ///< determines the results of a run; another value must be allowed
  position,     ///< determines the position in the data; another value is never allowed
  free          ///< affects only speed, memory, files and messages, or only how a run begins
};

/// Whether a saved plan is for one value of a key.
enum class PlanRole : std::uint8_t { fixed, free };

/// The effects of another value of a key.
struct KeyEffects {
  KeyRole on_resume;
  PlanRole on_plan;
};
inline constexpr KeyEffects kResultsAndPlan = {KeyRole::mathematics, PlanRole::fixed};
inline constexpr KeyEffects kResultsOnly = {KeyRole::mathematics, PlanRole::free};
inline constexpr KeyEffects kPositionAndPlan = {KeyRole::position, PlanRole::fixed};
inline constexpr KeyEffects kPlanOnly = {KeyRole::free, PlanRole::fixed};
inline constexpr KeyEffects kNeither = {KeyRole::free, PlanRole::free};

/// The documentation of a key, in the Markdown of configs/keys.md.
template <class Text>
struct KeyDocumentation {
  Text meaning;
  Text initial;  ///< the default, or where it comes from; may be ""
  Text range;    ///< accepted values; may be ""
};
/// The documentation in the table of keys. "{families}" stands for the families that have a key.
using KeyText = KeyDocumentation<std::string_view>;

/// A key of a config, identified by its path.
struct KeyInfo {
  std::string path;                      ///< "zero_optimization.offload_param.device"
  std::vector<std::string> values;       ///< accepted values, if only these are accepted
  std::vector<std::string> other_names;  ///< names that other programs use for its last part
  bool names_paths = false;              ///< whether its value is a file, a folder or a list of
                                         ///< them
  bool is_section = false;               ///< whether its value is an object of further keys
  KeyEffects effects = kResultsAndPlan;
  KeyDocumentation<std::string> text = {};
};

/// The table of all keys, in the order of `train --print-config`, without DeepSpeed's keys that
/// have no effect. Keys of single optimizers or families are included, and the sections whose keys
/// share effects or a text.
std::vector<KeyInfo> key_rows();

/// The rows that are no sections.
std::vector<KeyInfo> key_list();

/// The effects of another value of the key with this path ("optimizer.params.lr"). A key of another
/// version has the effects of its section, or else both.
KeyEffects effects_of(std::string_view path);

/// Values by path, as compact JSON.
using Settings = std::map<std::string, std::string>;

/// All keys of a config that are printed, with any role.
Settings all_settings(const Config& config);
/// Setting that checkpoints contain only if there is such a token. Versions without the key trained
/// the token's row like every other.
inline constexpr const char* kPadTokenSetting = "model.pad_token_id";
/// The keys that affect results, except for the files of the training data. Their content matters,
/// which the caller adds under the key that names them.
Settings settings_of(const Config& config);

/// A setting that differs between a checkpoint and the run that resumes from it.
struct SettingChange {
  std::string key;
  std::string before;  ///< compact JSON
  std::string now;     ///< compact JSON, or "none"
  [[nodiscard]] std::string text() const { return key + " " + before + " -> " + now; }
};

/// The settings in `before` that differ from those in `now`. Settings that `before` lacks belong to
/// a newer version, or to another type of optimizer or schedule, whose `type` differs.
std::vector<SettingChange> find_changes(const Settings& before, const Settings& now);

/// Throws Error(usage) with the nearest name unless each of `names` is "all", a key that determines
/// results, or a section with such keys ("optimizer").
void check_allowed_names(const std::vector<std::string>& names);

/// Returns whether the names of --allow-change allow another value of `key`.
bool is_allowed(const std::string& key, const std::vector<std::string>& allowed);

/// If `allowed` does not cover all `changes`, throws Error(config) with one line that begins with
/// `from` and lists all changes.
void refuse_changes(const std::vector<SettingChange>& changes,
                    const std::vector<std::string>& allowed, const std::string& from);

}  // namespace ballast::config
