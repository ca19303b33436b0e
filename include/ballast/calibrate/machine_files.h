#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <string_view>

#include "ballast/core/descriptor.h"
#include "ballast/core/error.h"
#include "ballast/core/log.h"

namespace ballast::calibrate {

// Cached measurements of this machine. An unusable file causes one warning and counts as missing.

/// Returns $XDG_CACHE_HOME/ballast/KIND-HASH.json for the hash of `key`, or the same below
/// ~/.cache. Empty if neither variable is set.
std::filesystem::path machine_file(std::string_view kind, const std::string& key);

/// Returns read(file), or an empty result if the file does not exist or read() throws an Error. The
/// error becomes a warning that begins with `complaint`.
template <class Read>
auto read_kept(const std::filesystem::path& file, std::string_view complaint, const Read& read)
    -> decltype(read(file)) {
  std::error_code ignored;
  if (file.empty() || !std::filesystem::exists(file, ignored)) return {};
  try {
    return read(file);
  } catch (const Error& error) {
    log(LogLevel::warning, std::string(complaint) + ": " + error.what());
    return {};
  }
}

/// Creates the file's folder. Throws Error(io).
void make_machine_folder(const std::filesystem::path& file);

/// Waits for the lock of `file` against other processes and threads. The lock is on a file with the
/// additional ending ".lock", which is not removed. It is held as long as the result exists. Throws
/// Error(io).
Descriptor lock_machine_file(const std::filesystem::path& file);

}  // namespace ballast::calibrate
