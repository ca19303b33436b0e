#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace ballast::train {

/// Which of a folder's files are taken.
enum class FolderFilter {
  text,       ///< those without NUL among their first 64 KiB
  token_bin,  ///< those whose name ends in .bin
};

/// The files that `patterns` (files, folders, globs) stand for, in order; see TokenSource::open.
/// Throws Error(data).
std::vector<std::filesystem::path> list_files(std::span<const std::string> patterns,
                                              FolderFilter filter);

}  // namespace ballast::train
