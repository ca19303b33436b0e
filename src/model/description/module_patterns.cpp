#include <algorithm>
#include <cmath>
#include <regex>
#include <string>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/model/lora.h"

namespace ballast::model {
namespace {

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

std::string text_of(std::string_view name, const ModulePatterns& patterns) {
  std::string text;
  for (const ModulePatterns::Row& row : patterns.rows()) {
    text += fmt::format(", {} {} for '{}'", name, row.value, row.pattern);
  }
  return text;
}

}  // namespace

bool ModulePatterns::add(std::string pattern, double value) {
  if (!is_read_alike(pattern)) return false;
  try {
    static_cast<void>(expression_of(pattern));
  } catch (const std::regex_error&) {
    return false;
  }
  rows_.push_back({std::move(pattern), value});
  return true;
}

std::optional<double> ModulePatterns::find(const std::string& module) const {
  for (const Row& row : rows_) {
    if (std::regex_match(module, expression_of(row.pattern))) return row.value;
  }
  return {};
}

bool ModulePatterns::matches_any(const Row& row, const std::vector<std::string>& modules) {
  const std::regex expression = expression_of(row.pattern);
  return std::any_of(modules.begin(), modules.end(), [&](const std::string& module) {
    return std::regex_match(module, expression);
  });
}

std::uint64_t AdapterConfig::rank_of(const std::string& module) const {
  constexpr double kMax = 1e15;  // no tensor has this number of rows
  const std::optional<double> found = rank_pattern.find(module);
  return found ? static_cast<std::uint64_t>(std::min(*found, kMax)) : rank;
}

double AdapterConfig::alpha_of(const std::string& module) const {
  return alpha_pattern.find(module).value_or(alpha);
}

double AdapterConfig::scale_of(const std::string& module) const {
  const auto r = static_cast<double>(rank_of(module));
  return alpha_of(module) / (rslora ? std::sqrt(r) : r);
}

std::string AdapterConfig::description() const {
  return fmt::format("rank {}, alpha {}{}{}{}{}, for {}", rank, alpha, rslora ? " (rsLoRA)" : "",
                     dora ? " (DoRA)" : "", text_of("rank", rank_pattern),
                     text_of("alpha", alpha_pattern), listed(targets));
}

}  // namespace ballast::model
