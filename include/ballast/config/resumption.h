#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/config/config.h"
#include "ballast/config/key_list.h"

namespace ballast::config {

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
struct Change {
  std::string key;
  std::string before;  ///< compact JSON
  std::string now;     ///< compact JSON, or "none"
  [[nodiscard]] std::string text() const { return key + " " + before + " -> " + now; }
};

/// The settings in `before` that differ from those in `now`. Settings that `before` lacks belong to
/// a newer version, or to another type of optimizer or schedule, whose `type` differs.
std::vector<Change> find_changes(const Settings& before, const Settings& now);

/// Throws Error(usage) with the nearest name unless each of `names` is "all", a key that determines
/// results, or a section with such keys ("optimizer").
void check_allowed_names(const std::vector<std::string>& names);

/// Returns whether the names of --allow-change allow another value of `key`.
bool is_allowed(const std::string& key, const std::vector<std::string>& allowed);

/// If `allowed` does not cover all `changes`, throws Error(config) with one line that begins with
/// `from` and lists all changes.
void refuse_changes(const std::vector<Change>& changes, const std::vector<std::string>& allowed,
                    const std::string& from);

}  // namespace ballast::config
