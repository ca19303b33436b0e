#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace ballast::formats {

/// Selects files of a folder.
enum class FolderFilter {
  text,       ///< no NUL in the first 64 KiB
  token_bin,  ///< name ends in .bin; if there is none, in .npy
  documents,  ///< name ends in .safetensors
};

struct ListedFile {
  std::filesystem::path path;
  bool in_folder = false;  ///< found in a folder; otherwise named, or matched by a glob
};

/// Expands `patterns` (files, folders, globs) in order; see TokenSource::open. Throws Error(data).
std::vector<ListedFile> list_files(std::span<const std::string> patterns, FolderFilter filter);

}  // namespace ballast::formats
