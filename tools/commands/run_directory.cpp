#include "tools/commands/run_directory.h"

#include <array>
#include <cstdlib>
#include <ctime>
#include <system_error>

#include <fmt/format.h>

#include "ballast/core/error.h"

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
  return state_home() / fmt::format("{}-{}", config.stem().string(), stamp.data());
}

std::filesystem::path create_run_directory(const std::filesystem::path& config) {
  const auto base = default_run_directory(config);
  auto directory = base;
  std::error_code error;
  std::filesystem::create_directories(base.parent_path(), error);
  for (int i = 2; !error; ++i) {
    // If it is false without an error, another run was faster.
    if (std::filesystem::create_directory(directory, error)) return directory;
    if (error == std::errc::file_exists) error.clear();
    directory = fmt::format("{}-{}", base.string(), i);
  }
  throw Error(ErrorCategory::io,
              fmt::format("cannot create a run directory in {}; choose one with --out",
                          base.parent_path().string()),
              error.value());
}

}  // namespace ballast::tools
