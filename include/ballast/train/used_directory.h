#pragma once

#include <filesystem>
#include <string_view>

namespace ballast::train {

/// Throws Error(usage) if the run directory `directory` has files of another run: metrics.jsonl,
/// config.json, run.json or weights. `ignored`: a name that may exist.
void refuse_used_directory(const std::filesystem::path& directory, std::string_view ignored = {});

}  // namespace ballast::train
