#include "tools/commands/request.h"

#include <system_error>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

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
        fmt::format("ignored: {} (no effect in Ballast; -v and configs/README.md say why)",
                    fmt::join(paths, ", ")));
  }
  for (const std::string& line : config.notes) log(LogLevel::info, line);
}

}  // namespace ballast::tools
