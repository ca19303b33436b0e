#include "ballast/core/units.h"

#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <initializer_list>

#include <fmt/format.h>

#include "ballast/core/error.h"

namespace ballast {
namespace {

struct Suffix {
  std::string_view text;
  double factor;
};

constexpr std::array<Suffix, 10> kScales = {{{"", 1},
                                             {"k", 1e3},
                                             {"K", 1e3},
                                             {"M", 1e6},
                                             {"G", 1e9},
                                             {"T", 1e12},
                                             {"Ki", 0x1p10},
                                             {"Mi", 0x1p20},
                                             {"Gi", 0x1p30},
                                             {"Ti", 0x1p40}}};

struct TimeUnit {
  std::string_view name;
  double seconds;
};

constexpr std::array<TimeUnit, 15> kTimeUnits = {{{"s", 1},
                                                  {"sec", 1},
                                                  {"second", 1},
                                                  {"seconds", 1},
                                                  {"m", 60},
                                                  {"min", 60},
                                                  {"minute", 60},
                                                  {"minutes", 60},
                                                  {"h", 3600},
                                                  {"hour", 3600},
                                                  {"hours", 3600},
                                                  {"d", 86400},
                                                  {"day", 86400},
                                                  {"days", 86400},
                                                  {"mins", 60}}};

std::string_view trim(std::string_view text) {
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.front()))) {
    text.remove_prefix(1);
  }
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back()))) {
    text.remove_suffix(1);
  }
  return text;
}

/// Returns the number in `text` times its suffix, or a negative value if `text` is invalid.
double parse_scaled(std::string_view text, bool unit_byte) {
  text = trim(text);
  double number = 0.0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || !std::isfinite(number)) return -1.0;
  std::string_view suffix = trim(text.substr(static_cast<std::size_t>(end - text.data())));
  if (unit_byte && !suffix.empty() && suffix.back() == 'B') suffix.remove_suffix(1);
  for (const auto& scale : kScales) {
    if (scale.text == suffix) return number * scale.factor;
  }
  return -1.0;
}

/// Formats three significant digits, `gap` and one of `prefixes` (powers of 1000). Values below
/// 1000 are rounded to whole numbers.
std::string format_scaled(double value, std::initializer_list<std::string_view> prefixes,
                          std::string_view gap) {
  const auto* prefix = prefixes.begin();
  while (std::abs(value) >= 999.5 && prefix + 1 != prefixes.end()) {
    value /= 1000.0;
    ++prefix;
  }
  const double size = std::abs(value);
  int digits = 0;
  if (prefix != prefixes.begin()) digits = size < 9.995 ? 2 : size < 99.95 ? 1 : 0;
  return fmt::format("{:.{}f}{}{}", value, digits, gap, *prefix);
}

}  // namespace

Bytes parse_bytes(std::string_view text) {
  const double value = parse_scaled(text, true);
  if (!(value >= 0.0) || value >= 0x1p63) {
    throw Error(ErrorCategory::config, fmt::format("'{}' is not {}", text, kSizeForm));
  }
  return static_cast<Bytes>(std::llround(value));
}

std::uint64_t parse_count(std::string_view text) {
  const double value = parse_scaled(text, false);
  if (!(value >= 0.0) || value >= 0x1p63) {
    throw Error(ErrorCategory::config,
                fmt::format("'{}' is not a count; write a number such as 1000 or \"256Mi\"", text));
  }
  return static_cast<std::uint64_t>(std::llround(value));
}

double parse_seconds(std::string_view text) {
  const std::string_view all = trim(text);
  double number = 0.0;
  const auto [end, error] = std::from_chars(all.data(), all.data() + all.size(), number);
  const std::string_view name = trim(all.substr(static_cast<std::size_t>(end - all.data())));
  constexpr double kMax = 1000.0 * 86400.0;
  for (const TimeUnit& unit : kTimeUnits) {
    const double seconds = number * unit.seconds;
    if (error == std::errc() && unit.name == name && seconds > 0.0 && seconds <= kMax) {
      return seconds;
    }
  }
  throw Error(ErrorCategory::config,
              fmt::format("'{}' is not {}, above 0 and at most 1000 days", text, kTimeForm));
}

std::string format_bytes(Bytes bytes) {
  constexpr std::array<std::string_view, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 999.5 && unit + 1 < kUnits.size()) {
    value /= 1024.0;
    ++unit;
  }
  if (unit == 0) return fmt::format("{} B", bytes);
  const int digits = value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
  return fmt::format("{:.{}f} {}", value, digits, kUnits[unit]);
}

std::string format_count(double count) {
  return format_scaled(count, {"", "k", "M", "B", "T"}, "");
}

std::string format_rate(double per_second, std::string_view unit) {
  return format_scaled(per_second, {"", "k", "M", "G", "T", "P"}, " ") + std::string(unit) + "/s";
}

std::string format_seconds(double seconds) {
  if (!(seconds >= 0.0)) return "?";
  if (seconds < 1.0) return fmt::format("{:.0f}ms", seconds * 1e3);
  if (seconds < 60.0) return fmt::format("{:.1f}s", seconds);
  const auto whole = static_cast<std::uint64_t>(std::llround(seconds));
  if (whole < 3600) return fmt::format("{}m{:02}s", whole / 60, whole % 60);
  if (whole < std::uint64_t{48} * 3600)
    return fmt::format("{}h{:02}m", whole / 3600U, whole / 60U % 60U);
  return fmt::format("{}d{:02}h", whole / 86400, whole / 3600 % 24);
}

}  // namespace ballast
