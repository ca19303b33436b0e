#pragma once

#include <filesystem>
#include <vector>

#include "ballast/checkpoint/checkpoints.h"
#include "ballast/text/json.h"

namespace ballast::tools {

/// Answers `questions` for each checkpoint, with its progress on a terminal.
std::vector<checkpoint::CheckpointReport> examine(const std::vector<std::filesystem::path>& folders,
                                                  const checkpoint::CheckpointQuestions& questions);

/// A report as an object of --json.
text::Json report_json(const checkpoint::CheckpointReport& report,
                       const checkpoint::CheckpointQuestions& questions);
/// The path of the checkpoint that --resume takes; null if all are damaged, or if the latest one
/// that is not damaged cannot be read.
text::Json resumed_one(const std::vector<checkpoint::CheckpointReport>& reports);

/// Prints everything about one checkpoint.
void print_checkpoint(const checkpoint::CheckpointReport& report,
                      const checkpoint::CheckpointQuestions& questions);
/// Prints a line per checkpoint of a run, and the one that --resume takes.
void print_checkpoints(const std::vector<checkpoint::CheckpointReport>& reports,
                       const checkpoint::CheckpointQuestions& questions);

/// Throws Error(io) if a checkpoint cannot be read, Error(data) if one is damaged. `path` is the
/// one that the user has named.
void refuse_damage(const std::filesystem::path& path,
                   const std::vector<checkpoint::CheckpointReport>& reports);

/// Lists the swap files in `directory`, as JSON if `json`. Removes those that no run owns first if
/// `remove`. Throws Error(io).
void inspect_swap(const std::filesystem::path& directory, bool remove, bool json);

}  // namespace ballast::tools
