#include "tools/request.h"

namespace ballast::tools {

std::string option(Caller caller, const std::string& name, const std::string& value) {
  if (caller == Caller::program) return "--" + name + (value.empty() ? "" : " " + value);
  return name + "=" + value;
}

config::Config ConfigRequest::load(std::uint32_t world) const {
  if (!text) return config::load(file, overrides, world);
  return config::parse(*text, std::filesystem::current_path(), file.string(), overrides, world);
}

void log_notes(const config::Config& config, LogLevel ignored) {
  for (const auto& line : config.ignored) log(ignored, "ignored: " + line);
  for (const auto& line : config.notes) log(LogLevel::info, line);
}

}  // namespace ballast::tools
