#include <algorithm>
#include <array>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ballast/config/key_effects.h"
#include "ballast/core/error.h"

#include "src/config/key_table.h"
#include "src/model/description/layer_rules.h"

namespace ballast::config {
namespace {

const std::vector<KeyInfo>& rows() {
  static const std::vector<KeyInfo> all = key_rows();
  return all;
}

constexpr std::string_view kAll = "all";
constexpr std::array<std::string_view, 4> kKinds = {"data.text", "data.tokens", "data.documents",
                                                    "data.pairs"};

bool is_in(std::string_view key, std::string_view section) {
  return key.size() > section.size() && key.starts_with(section) && key[section.size()] == '.';
}

/// The row of a key or, for a key of another version, of its innermost section; null if there is
/// none.
const KeyInfo* row_of(std::string_view path) {
  const KeyInfo* found = nullptr;
  for (const KeyInfo& row : rows()) {
    if (row.path == path) return &row;
    if (row.is_section && is_in(path, row.path)) found = &row;
  }
  return found;
}

/// Whether the table has rows of keys in `path`.
bool is_section(std::string_view path) {
  return std::ranges::any_of(rows(), [path](const KeyInfo& row) { return is_in(row.path, path); });
}

void add_settings(const Json& value, const std::string& path, Settings& settings) {
  if (!value.is_object() || !(path.empty() || is_section(path))) {
    settings.emplace(path, value.compact());
    return;
  }
  for (const auto& member : value.members()) {
    add_settings(member.value, path.empty() ? member.key : path + "." + member.key, settings);
  }
}

/// The names for --allow-change that cover `keys`: a section if several of its keys are among them.
std::vector<std::string> shortest_names(const std::vector<std::string>& keys) {
  std::vector<std::string> names;
  for (const std::string& key : keys) {
    const std::string section = key.substr(0, key.find('.'));
    const auto inside = [&section](const std::string& other) { return is_in(other, section); };
    const bool several = section != "ballast" && section != "zero_optimization" &&
                         std::count_if(keys.begin(), keys.end(), inside) > 1;
    const std::string& name = several ? section : key;
    if (names.empty() || names.back() != name) names.push_back(name);
  }
  return names;
}

/// Keys and sections that can be allowed.
std::vector<std::string> allowed_names() {
  std::vector<std::string> names = {std::string(kAll)};
  for (const KeyInfo& row : rows()) {
    if (row.effects.on_resume != KeyRole::mathematics) continue;
    std::string_view path = row.path;
    for (; true; path = path.substr(0, path.rfind('.'))) {
      // "ballast" as a whole cannot be allowed.
      if (path != "ballast" && path != "zero_optimization") names.emplace_back(path);
      if (path.find('.') == std::string_view::npos) break;
    }
  }
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

}  // namespace

KeyEffects effects_of(std::string_view path) {
  const KeyInfo* const row = row_of(path);
  return row == nullptr ? kResultsAndPlan : row->effects;
}

Settings all_settings(const Config& config) {
  Config copy = config;  // the key table needs mutable fields
  Settings settings;
  add_settings(write_section(all_keys(copy)), "", settings);
  return settings;
}

Settings settings_of(const Config& config) {
  Settings settings = all_settings(config);
  const auto omitted = [&config](const auto& setting) {
    const std::string& key = setting.first;
    if (std::find(kKinds.begin(), kKinds.end(), key) != kKinds.end()) return true;
    // Keys without effect.
    if (is_in(key, "fp16")) return config.type != DType::f16 && key != "fp16.enabled";
    if (key == kPadTokenSetting) return setting.second == "null";
    if (is_in(key, "ballast.preference")) return config.data.pairs.empty();
    if (key == "ballast.router_losses") return !model::router_losses(config.model).any();
    if (is_in(key, "ballast.spike") && key != "ballast.spike.action") {
      return config.ballast.spike.action == SpikeSection::Action::off;
    }
    return effects_of(key).on_resume == KeyRole::free;
  };
  std::erase_if(settings, omitted);
  return settings;
}

std::vector<SettingChange> find_changes(const Settings& before, const Settings& now) {
  std::vector<SettingChange> changes;
  for (const auto& [key, value] : before) {
    const auto found = now.find(key);
    if (found == now.end()) {
      changes.push_back({key, value, "none"});
    } else if (found->second != value) {
      changes.push_back({key, value, found->second});
    }
  }
  return changes;
}

void check_allowed_names(const std::vector<std::string>& names) {
  const std::vector<std::string> known = allowed_names();
  for (const std::string& name : names) {
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    const KeyInfo* const row = row_of(name);
    // A key of another version.
    if (row != nullptr && row->effects.on_resume == KeyRole::mathematics) continue;
    const auto refuse = [&name](const std::string& why) {
      throw Error(ErrorCategory::usage, fmt::format("--allow-change {}: {}", name, why));
    };
    if (row != nullptr && row->effects.on_resume == KeyRole::free)
      refuse("may change without this; remove it");
    if (row != nullptr) refuse("cannot change, because the position in the data follows from it");
    refuse(fmt::format("there is no such key of results{}", did_you_mean(name, known)));
  }
}

bool is_allowed(const std::string& key, const std::vector<std::string>& allowed) {
  return std::any_of(allowed.begin(), allowed.end(), [&key](const std::string& name) {
    return name == kAll || name == key || is_in(key, name);
  });
}

void refuse_changes(const std::vector<SettingChange>& changes,
                    const std::vector<std::string>& allowed, const std::string& from) {
  std::vector<std::string> texts;
  std::vector<std::string> positions;
  std::vector<std::string> refused;
  for (const SettingChange& change : changes) {
    texts.push_back(change.text());
    const KeyInfo* const row = row_of(change.key);
    if (row != nullptr && row->effects.on_resume == KeyRole::position) {
      positions.push_back(change.key);
    } else if (!is_allowed(change.key, allowed)) {
      refused.push_back(change.key);
    }
  }
  if (positions.empty() && refused.empty()) return;
  std::string advice = "set them to those of the checkpoint";
  if (!refused.empty()) {
    advice += fmt::format(", or accept them with --allow-change {}",
                          fmt::join(shortest_names(refused), " --allow-change "));
  }
  if (!positions.empty()) {
    advice += fmt::format("; the position in the data follows from {}, which cannot change",
                          fmt::join(positions, " and "));
  }
  throw Error(ErrorCategory::config,
              fmt::format("{}: the config changes what the run computes: {}; {}", from,
                          fmt::join(texts, ", "), advice));
}

}  // namespace ballast::config
