#pragma once

#include <filesystem>
#include <functional>
#include <span>
#include <string>

#include "ballast/config/config.h"

namespace ballast::config {

/// A key and the value that it shall have.
struct Edit {
  std::string path;  ///< "aio.block_size"
  std::string json;  ///< the value as JSON; further lines are indented with the key
};

/// `text`, a config, with the edits made: values replaced, keys and sections that are missing put
/// at the end of theirs, in the form of their neighbours. The rest stays byte for byte, comments
/// included. Throws Error(config), naming `name`, for text that is no config file and for a path
/// that leads through something that is no section.
std::string edit_text(std::string text, std::span<const Edit> edits, const std::string& name);

/// Makes the edits in `file`, all or none: a new file is written beside it, read back, given to
/// `accept`, which throws to refuse what it says, synced, and put in the old one's place with the
/// old one's mode. A failure leaves the old file. Through a symbolic link its target is edited.
/// Throws Error(config) or Error(io).
void edit_file(const std::filesystem::path& file, std::span<const Edit> edits,
               const std::function<void(const Config&)>& accept);

}  // namespace ballast::config
