#pragma once

#include <string>

#include "tools/usage/table.h"

namespace ballast::tools {

/// Describes a mistake in a path of the command line. One that is read does not exist, or is a
/// folder instead of a file or the reverse. The folder of one that is written is a file. Returns ""
/// if there is none, for globs, and if `takes` is not a path. Files with other content are refused
/// by their readers.
std::string path_mistake(Names takes, const std::string& path);

}  // namespace ballast::tools
