#include "tools/commands/requests.h"

#include <array>
#include <cstdlib>
#include <ctime>
#include <system_error>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ballast/core/error.h"

namespace ballast::tools {

std::string option(Caller caller, const std::string& name, const std::string& value) {
  if (caller == Caller::program) return "--" + name + (value.empty() ? "" : " " + value);
  return name + "=" + value;
}

void refuse_other_kind(const std::filesystem::path& file, formats::Settings wanted,
                       const Error& error) {
  std::error_code ignored;
  const bool read =
      error.category() == ErrorCategory::config && std::filesystem::is_regular_file(file, ignored);
  const std::string cause = read ? formats::explain_other_settings(file, wanted) : "";
  if (!cause.empty()) throw Error(ErrorCategory::config, cause);
}

config::Config ConfigRequest::load(std::uint32_t world) const {
  if (!text) {
    try {
      return config::load(file, overrides, world);
    } catch (const Error& error) {
      refuse_other_kind(file, formats::Settings::config, error);
      throw;
    }
  }
  return config::parse(*text, std::filesystem::current_path(), file.string(), overrides, world);
}

void log_notes(const config::Config& config) {
  std::vector<std::string> paths;
  for (const std::string& line : config.ignored) {
    log(LogLevel::debug, "ignored: " + line);
    paths.push_back(line.substr(0, line.find(": ")));
  }
  if (!paths.empty()) {
    log(LogLevel::info,
        fmt::format("ignored: {} (no effect in Ballast; -v and configs/keys.md say why)",
                    fmt::join(paths, ", ")));
  }
  for (const std::string& line : config.notes) log(LogLevel::info, line);
}

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
