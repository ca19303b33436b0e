#pragma once

#include <filesystem>

#include "ballast/train/used_directory.h"

namespace ballast::train {

// What a run writes in its directory, in addition to kRunWeights, kCheckpoints and what monitors
// do.
inline constexpr const char* kMetrics = "metrics.jsonl";
inline constexpr const char* kConfig = "config.json";
inline constexpr const char* kRun = "run.json";

/// Whether `name` is one of these.
bool is_of_run_directory(const std::filesystem::path& name);

/// Throws Error(usage): `file` is of another run.
[[noreturn]] void refuse_used(const std::filesystem::path& file);

/// --overwrite replaces runs, nothing else. Throws Error(usage) if `directory` has files that a run
/// would replace but no run has written, if they are symbolic links, or if `directory` is a
/// symbolic link to another run.
void refuse_foreign_files(const std::filesystem::path& directory);

}  // namespace ballast::train
