#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <string_view>

#include "ballast/core/descriptor.h"
#include "ballast/core/error.h"
#include "ballast/core/log.h"

namespace ballast::calibrate {

// What was measured on this machine, kept for later runs. A file that cannot be used is one warning
// and counts as missing.

/// $XDG_CACHE_HOME/ballast/KIND-HASH.json for the hash of `key`, or the same below ~/.cache. Empty
/// if neither variable is set.
std::filesystem::path machine_file(std::string_view kind, const std::string& key);

/// read(file), or an empty result if there is no such file or read() throws an Error, which becomes
/// a warning that begins with `complaint`.
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

/// Waits until no other process or thread has the lock of `file`, which is the file beside it with
/// the ending ".lock" and stays there. The lock ends with the result. Throws Error(io).
Descriptor lock_machine_file(const std::filesystem::path& file);

}  // namespace ballast::calibrate
