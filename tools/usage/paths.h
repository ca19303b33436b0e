#pragma once

#include <string>

#include "tools/usage/table.h"

namespace ballast::tools {

/// Describes a mistake in a path of the command line that is read: it does not exist, or is a
/// folder instead of a file or the reverse. Returns "" if it can be read, is a glob, or `takes` is
/// not a path to read. Files with other content are refused by their readers.
std::string path_mistake(Names takes, const std::string& path);

}  // namespace ballast::tools
