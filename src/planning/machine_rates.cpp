#include "ballast/planning/machine_rates.h"

#include <cstdlib>
#include <optional>
#include <system_error>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/core/log.h"
#include "ballast/planning/calibrate.h"
#include "ballast/planning/rates_file.h"

namespace ballast::planning {
namespace {

constexpr std::string_view kName = "this machine";

/// FNV-1a, 64 bits. Source: Fowler, Noll, Vo; constants of the IETF draft draft-eastlake-fnv.
std::uint64_t hash(std::string_view text) {
  std::uint64_t value = 0xcbf29ce484222325U;
  for (const char c : text) value = (value ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  return value;
}

/// Those in `file`, if they were measured for `key`: it is kept as their name.
std::optional<schedule::Rates> cached(const std::filesystem::path& file, const std::string& key) {
  std::error_code ignored;
  if (file.empty() || !std::filesystem::exists(file, ignored)) return std::nullopt;
  try {
    schedule::Rates rates = load_rates(file);
    if (rates.name != key) return std::nullopt;
    rates.name = kName;
    return rates;
  } catch (const Error& error) {
    log(LogLevel::warning, fmt::format("rates: measuring again: {}", error.what()));
    return std::nullopt;
  }
}

void keep(const std::filesystem::path& file, schedule::Rates rates, const std::string& key) {
  rates.name = key;
  try {
    std::error_code failure;
    std::filesystem::create_directories(file.parent_path(), failure);
    if (failure) {
      throw Error(ErrorCategory::io, "cannot make " + file.parent_path().string(), failure.value());
    }
    save_rates(file, rates);
  } catch (const Error& error) {
    log(LogLevel::warning, fmt::format("rates: not kept for the next time: {}", error.what()));
  }
}

}  // namespace

std::filesystem::path rates_cache_file(const std::string& key) {
  std::filesystem::path cache;
  if (const char* xdg = std::getenv("XDG_CACHE_HOME"); xdg != nullptr && *xdg == '/') {
    cache = xdg;
  } else if (const char* home = std::getenv("HOME"); home != nullptr && *home == '/') {
    cache = std::filesystem::path(home) / ".cache";
  } else {
    return {};
  }
  return cache / "ballast" / fmt::format("rates-{:016x}.json", hash(key));
}

schedule::Rates machine_rates(const config::Config& config, const model::Architecture& model,
                              bool recalibrate) {
  const std::string key = calibration_key(config, model);
  const std::filesystem::path file = rates_cache_file(key);
  if (!recalibrate) {
    if (const auto rates = cached(file, key)) return *rates;
  }
  log(LogLevel::info, "rates: measuring this machine, which takes a few seconds");
  schedule::Rates rates = calibrate(config, model);
  const bool complete = rates.read_per_second > 0.0 || !may_swap(config);
  if (!file.empty() && complete) keep(file, rates, key);
  return rates;
}

}  // namespace ballast::planning
