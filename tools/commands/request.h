#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "ballast/config/config.h"
#include "ballast/core/error.h"
#include "ballast/core/log.h"
#include "ballast/formats/settings_kind.h"

namespace ballast::tools {

/// Who asks for a plan or a run. Errors name the options of the caller.
enum class Caller { program, python };

/// "--out DIR" or "out=DIR".
std::string option(Caller caller, const std::string& name, const std::string& value = "");

/// A config and changes to it.
struct ConfigRequest {
  std::filesystem::path file;
  /// JSON instead of the file, which then only names it. Paths in it are relative to the working
  /// directory.
  std::optional<std::string> text;
  std::vector<std::string> overrides;
  Caller caller = Caller::program;

  /// Throws Error(config).
  [[nodiscard]] config::Config load(std::uint32_t world) const;
};

/// Throws Error(config) that says what `file` is if its reader has failed with `error` because it
/// is another kind of file than `wanted`. Otherwise returns.
void refuse_other_kind(const std::filesystem::path& file, formats::Settings wanted,
                       const Error& error);

/// Logs what of DeepSpeed's config is ignored, at `ignored`, and what means something else here.
void log_notes(const config::Config& config, LogLevel ignored = LogLevel::debug);

}  // namespace ballast::tools
