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

/// Caller that asks for a plan or a run. Errors name its options.
enum class Caller { program, python };

/// "--out DIR" or "out=DIR".
std::string option(Caller caller, const std::string& name, const std::string& value = "");

/// A config and changes to it.
struct ConfigRequest {
  std::filesystem::path file;
  /// JSON text instead of the file's content; the file then only gives the name. Paths in it are
  /// relative to the working directory.
  std::optional<std::string> text;
  std::vector<std::string> overrides;
  Caller caller = Caller::program;

  /// Throws Error(config).
  [[nodiscard]] config::Config load(std::uint32_t world) const;
};

/// If `file`, whose reader failed with `error`, is of another kind than `wanted`, throws
/// Error(config) with that kind. Otherwise returns.
void refuse_other_kind(const std::filesystem::path& file, formats::Settings wanted,
                       const Error& error);

/// Logs the DeepSpeed keys that are ignored, in one line, and those that have another meaning here.
/// The reasons why keys are ignored have the level debug.
void log_notes(const config::Config& config);

}  // namespace ballast::tools
