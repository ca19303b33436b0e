#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/config/config.h"

namespace ballast::config {

/// The effect of a key on a run that resumes.
enum class KeyRole {
  mathematics,  ///< which results a run computes; another value must be allowed
  position,     ///< where in the data a step is; another value is never allowed
  free          ///< nothing but speed, memory, files and messages, or only how a run begins
};

/// The role of the key with this path ("optimizer.params.lr"), by the table in resumption.cpp.
/// Throws ContractViolation if the table lacks it.
KeyRole role_of(std::string_view path);

/// Values by path, as compact JSON.
using Settings = std::map<std::string, std::string>;

/// All keys of a config that are printed, whatever their role.
Settings all_settings(const Config& config);
/// The keys that affect results, except for the files of the training data: their content counts,
/// which the caller adds under the key that names them.
Settings settings_of(const Config& config);

/// A setting that differs between a checkpoint and the run that resumes from it.
struct Change {
  std::string key;
  std::string before;  ///< compact JSON
  std::string now;     ///< compact JSON, or "none"
  [[nodiscard]] std::string text() const { return key + " " + before + " -> " + now; }
};

/// The settings in `before` that differ from those in `now`. Settings that `before` lacks are of a
/// newer version, or of another type of optimizer or schedule, whose `type` differs.
std::vector<Change> find_changes(const Settings& before, const Settings& now);

/// Throws Error(usage) unless each of `names` is "all", a key that is mathematics, or a section
/// with such keys ("optimizer"); names the nearest one.
void check_allowed_names(const std::vector<std::string>& names);

/// Throws Error(config) with one line that begins with `from` and lists all changes if `allowed`
/// does not cover one of them.
void refuse_changes(const std::vector<Change>& changes, const std::vector<std::string>& allowed,
                    const std::string& from);

}  // namespace ballast::config
