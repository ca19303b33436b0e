#include "tools/run_directory.h"

#include <array>
#include <cstdlib>
#include <ctime>

#include <fmt/format.h>

namespace ballast::tools {
namespace {

/// $XDG_STATE_HOME/ballast, its default location, or /var/tmp for users without a home.
std::filesystem::path state_home() {
  if (const char* state = std::getenv("XDG_STATE_HOME"); state != nullptr && *state == '/') {
    return std::filesystem::path(state) / "ballast";
  }
  if (const char* home = std::getenv("HOME"); home != nullptr && *home == '/') {
    return std::filesystem::path(home) / ".local/state/ballast";
  }
  return "/var/tmp/ballast";
}

}  // namespace

std::filesystem::path default_run_directory(const std::filesystem::path& config) {
  const std::time_t now = std::time(nullptr);
  std::tm local = {};
  localtime_r(&now, &local);
  std::array<char, 32> stamp{};
  std::strftime(stamp.data(), stamp.size(), "%Y%m%d-%H%M%S", &local);
  const auto base = state_home() / fmt::format("{}-{}", config.stem().string(), stamp.data());
  auto directory = base;
  for (int i = 2; std::filesystem::exists(directory); ++i) {
    directory = fmt::format("{}-{}", base.string(), i);
  }
  return directory;
}

}  // namespace ballast::tools
