#include <algorithm>
#include <array>
#include <cmath>
#include <regex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/config/adapter_folder.h"
#include "ballast/core/error.h"
#include "ballast/text/files.h"

#include "src/config/adapter_rules.h"
#include "src/config/adapter_targets.h"

namespace ballast::config {
namespace {

namespace fs = std::filesystem;
using text::Json;

/// Keys of LoraConfig that determine which modules are trained, or how. The tensors show the
/// result.
constexpr std::array kShownByTensors = {
    "bias",      "exclude_modules", "init_lora_weights", "layers_pattern", "layers_to_transform",
    "lora_bias", "lora_dropout",    "modules_to_save",   "target_modules", "velora_config"};

/// Whether std::regex reads `pattern` like Python's re: without groups other than (?:...) and
/// (?=...), and only with escapes of characters and of common classes.
bool is_read_alike(std::string_view pattern) {
  constexpr std::size_t kLongest = 1000;
  constexpr std::string_view kClasses = "dDwWsSbB";
  if (pattern.size() > kLongest) return false;
  for (std::size_t i = 0; i + 1 < pattern.size(); ++i) {
    const char next = pattern[i + 1];
    if (pattern[i] == '(' && next == '?' && i + 2 < pattern.size()) {
      if (std::string_view(":=!").find(pattern[i + 2]) == std::string_view::npos) return false;
    }
    if (pattern[i] == '[' && next == '[') return false;
    if (pattern[i] != '\\') continue;
    const bool letter = (next >= 'a' && next <= 'z') || (next >= 'A' && next <= 'Z') ||
                        (next >= '0' && next <= '9');
    if (letter && kClasses.find(next) == std::string_view::npos) return false;
    ++i;
  }
  return true;
}

/// PEFT's rule: re.match(rf"(.*\.)?({key})$", module).
std::regex expression_of(const std::string& pattern) {
  return std::regex("(?:.*\\.)?(?:" + pattern + ")");
}

/// A pattern for the ends of module names, and the number for such modules.
struct PatternReader {
  const std::string& file;
  std::string_view key;

  std::vector<MergeSettings::Pattern> read(const Json* found) const {
    std::vector<MergeSettings::Pattern> patterns;
    if (found == nullptr || found->is_null()) return patterns;
    if (!found->is_object()) refuse_adapters(file, key, *found, "an object is expected");
    for (const auto& [pattern, value, at] : found->members()) {
      const bool rank = key == "rank_pattern";
      if (!value.is_number() || !(value.number() > 0.0) || (rank && !value.whole())) {
        refuse_adapters(file, key, *found,
                        rank ? "its values must be whole numbers above 0"
                             : "its values must be numbers above 0");
      }
      if (!is_read_alike(pattern)) fail(*found, pattern);
      try {
        static_cast<void>(expression_of(pattern));
        patterns.push_back({pattern, value.number()});
      } catch (const std::regex_error&) {
        fail(*found, pattern);
      }
    }
    return patterns;
  }

  [[noreturn]] void fail(const Json& found, const std::string& pattern) const {
    refuse_adapters(file, key, found,
                    fmt::format("Ballast cannot read the regular expression '{}'; write the names "
                                "of the modules out",
                                text::printable(pattern)));
  }
};

const MergeSettings::Pattern* find_match(const std::vector<MergeSettings::Pattern>& patterns,
                                         const std::string& module) {
  const auto found = std::find_if(patterns.begin(), patterns.end(), [&](const auto& pattern) {
    return std::regex_match(module, expression_of(pattern.names));
  });
  return found == patterns.end() ? nullptr : &*found;
}

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

std::uint64_t MergeSettings::rank_of(const std::string& module) const {
  const Pattern* const found = find_match(ranks, module);
  constexpr double kMost = 1e15;  // no tensor has this number of rows
  return found == nullptr ? rank : static_cast<std::uint64_t>(std::min(found->value, kMost));
}

double MergeSettings::scale_of(const std::string& module) const {
  const Pattern* const found = find_match(alphas, module);
  const auto r = static_cast<double>(rank_of(module));
  return (found == nullptr ? alpha : found->value) / (rslora ? std::sqrt(r) : r);
}

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
                                "rank_pattern",
                                "alpha_pattern",
                                "trainable_token_indices"};
  const auto is_one_of = [](const auto& list, const std::string& key) {
    return std::find(list.begin(), list.end(), key) != list.end();
  };
  for (const auto& [key, value, at] : json.members()) {
    if (key == "init_lora_weights" && !(value == kMica)) check_beginning(file, value);
    if (is_one_of(kRead, key) || is_one_of(kShownByTensors, key)) continue;
    if (key == kTargetParameters) {
      modules_of_parameters(file, value);
      continue;
    }
    check_adapter_key(file, key, value);
  }
  MergeSettings settings;
  if (const Json* const rank = json.find("r"); rank != nullptr && !rank->is_null()) {
    if (!rank->whole()) refuse_adapters(file, "r", *rank, "a whole number is expected");
    settings.rank = *rank->whole();
  }
  settings.alpha = number_of(file, json, "lora_alpha", settings.alpha);
  settings.rslora = flag_of(file, json, "use_rslora");
  settings.dora = flag_of(file, json, "use_dora");
  settings.input_first = flag_of(file, json, "fan_in_fan_out");
  settings.ranks = PatternReader{file, "rank_pattern"}.read(json.find("rank_pattern"));
  settings.alphas = PatternReader{file, "alpha_pattern"}.read(json.find("alpha_pattern"));
  read_tokens(file, json, settings);
  return settings;
}

}  // namespace ballast::config
