#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace ballast::train {

/// Selects files of a folder.
enum class FolderFilter {
  text,       ///< no NUL in the first 64 KiB
  token_bin,  ///< name ends in .bin
  documents,  ///< name ends in .safetensors
};

/// Expands `patterns` (files, folders, globs) in order; see TokenSource::open. Throws Error(data).
std::vector<std::filesystem::path> list_files(std::span<const std::string> patterns,
                                              FolderFilter filter);

}  // namespace ballast::train
