#pragma once

#include <filesystem>

#include "ballast/train/used_directory.h"

namespace ballast::train {

// Files that a run writes in its directory, in addition to kRunWeights, kCheckpoints and files of
// monitors.
inline constexpr const char* kMetrics = "metrics.jsonl";
inline constexpr const char* kConfig = "config.json";
inline constexpr const char* kRun = "run.json";

/// Returns whether `name` is one of these files.
bool is_of_run_directory(const std::filesystem::path& name);

/// Throws Error(usage), because `file` belongs to another run.
[[noreturn]] void refuse_used(const std::filesystem::path& file);

/// Checks that --overwrite replaces only runs. Throws Error(usage) if `directory` has files in the
/// place of a run's that no run has written, if they are symbolic links, or if `directory` is a
/// symbolic link to another run.
void refuse_foreign_files(const std::filesystem::path& directory);

}  // namespace ballast::train
