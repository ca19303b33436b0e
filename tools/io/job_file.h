#pragma once

#include <filesystem>

namespace ballast::tools {

class Command;

/// Reads options of `command` from an INI or TOML file without sections. The keys are the long
/// options, and a value may be a list. The command line overrides the file. A `path` is relative to
/// the file. Throws Error(usage) that names file and key.
void read_job_file(Command command, const std::filesystem::path& file);

}  // namespace ballast::tools
