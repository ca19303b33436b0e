#pragma once

#include <filesystem>
#include <functional>
#include <span>
#include <string>

#include "ballast/config/config.h"

namespace ballast::config {

/// A key and its new value.
struct Edit {
  std::string path;  ///< "aio.block_size"
  std::string json;  ///< the value as JSON; further lines are indented with the key
};

/// Applies `edits` to the config `text`: replaces values and appends missing keys and sections to
/// their parents, formatted like their neighbours. A section that is null is replaced. If the text
/// has the section under its deprecated name (`zero_optimization.aio`, `bfloat16`), the key is set
/// there. All other bytes, including comments, stay the same. Throws Error(config), naming `name`,
/// for text that is not a config file and for a path through a value that is not a section.
std::string edit_text(std::string text, std::span<const Edit> edits, const std::string& name);

/// Applies `edits` to `file` atomically. The new text is written to a temporary file, parsed and
/// passed to `accept`, which throws to reject it; then the file is replaced and keeps its mode. A
/// failure keeps the old file. A symbolic link's target is edited. Throws Error(config) or
/// Error(io).
void edit_file(const std::filesystem::path& file, std::span<const Edit> edits,
               const std::function<void(const Config&)>& accept);

/// Does everything of edit_file() except replacing the file. Throws the same errors.
void try_edit(const std::filesystem::path& file, std::span<const Edit> edits,
              const std::function<void(const Config&)>& accept);

}  // namespace ballast::config
