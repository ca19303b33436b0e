#pragma once

#include <filesystem>

namespace ballast::tools {

/// Lists the swap files in `directory`, as JSON if `json`. Removes those that no run owns first if
/// `remove`. Throws Error(io).
void inspect_swap(const std::filesystem::path& directory, bool remove, bool json);

}  // namespace ballast::tools
