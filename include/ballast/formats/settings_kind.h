#pragma once

#include <filesystem>
#include <string>

namespace ballast::formats {

enum class Settings { config, rates };

/// Describes a file that is not `wanted` and what to do with it: "chat.jsonl is JSON Lines, not a
/// config: ...". Returns "" if it looks like `wanted`, or like text or JSON of an unknown kind. For
/// the error of a reader that could not read it.
std::string explain_other_settings(const std::filesystem::path& path, Settings wanted);

}  // namespace ballast::formats
