#pragma once

#include <filesystem>
#include <vector>

#include "ballast/checkpoint/checkpoints.h"
#include "ballast/text/json.h"

namespace ballast::tools {

/// Reads what `questions` ask for of each, with its progress on a terminal.
std::vector<checkpoint::CheckpointReport> examine(const std::vector<std::filesystem::path>& folders,
                                                  const checkpoint::CheckpointQuestions& questions);

/// A report as an object of --json.
text::Json report_json(const checkpoint::CheckpointReport& report,
                       const checkpoint::CheckpointQuestions& questions);
/// The path of the checkpoint that --resume takes; null if all of them are damaged, or if the
/// newest one that is not damaged cannot be read.
text::Json resumed_one(const std::vector<checkpoint::CheckpointReport>& reports);

/// Prints all about one checkpoint.
void print_checkpoint(const checkpoint::CheckpointReport& report,
                      const checkpoint::CheckpointQuestions& questions);
/// Prints a line for each checkpoint of a run, and which one --resume takes.
void print_checkpoints(const std::vector<checkpoint::CheckpointReport>& reports,
                       const checkpoint::CheckpointQuestions& questions);

/// Throws Error(io) if a checkpoint cannot be read, Error(data) if one is damaged; `path` is what
/// the user has named.
void refuse_damage(const std::filesystem::path& path,
                   const std::vector<checkpoint::CheckpointReport>& reports);

}  // namespace ballast::tools
