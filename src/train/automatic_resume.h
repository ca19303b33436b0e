#pragma once

#include <filesystem>
#include <optional>

#include "ballast/config/config.h"
#include "ballast/config/resumption.h"
#include "ballast/train/run_events.h"
#include "ballast/train/run_options.h"

namespace ballast::train {

/// Decides what a run with RunDirectory::automatic does in `directory`, which it has locked.
/// `is_new`: there was no metrics.jsonl. Continued if there are checkpoints, complete or not. Fresh
/// if there are no files of a run. Overwritten if there are files of a run that was killed before
/// its first checkpoint. Throws Error(usage) with the file that a run must not replace without
/// being asked, Error(io).
RunDirectory begin_or_continue(const std::filesystem::path& directory, bool is_new);

/// Returns the run of `config` if nothing is left to do in its directory: its last step is in
/// metrics.jsonl, and RunEnd::is_complete(). Empty if a readable checkpoint has other
/// settings than `settings`, so that the resume refuses or allows them.
std::optional<FinishedRun> find_finished(const config::Config& config,
                                         const config::Settings& settings);

}  // namespace ballast::train
