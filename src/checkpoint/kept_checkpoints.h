#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "ballast/engine/run_states.h"
#include "ballast/text/json.h"

namespace ballast::checkpoint {

// States on NVMe are not copied into a checkpoint. They stay in the swap files of the run, which
// get an additional name: rank-R.swap-P in the folder of the checkpoint or, if that is on another
// file system, the name of owner.h next to them.

/// Converts `kept` to JSON. Names of files in the folder of the checkpoint are stored without that
/// folder.
text::Json json_of(const engine::KeptStates& kept);
/// Reads them back from the file `path` in the folder of a checkpoint. Throws Error(data) with
/// `path`.
engine::KeptStates kept_states_of(const text::Json& json, const std::filesystem::path& path);

/// Removes a checkpoint atomically: first its name, so that no part of it is found, then its files,
/// including those elsewhere that belong to its run. Does nothing if it does not exist. Throws
/// Error(io) if it keeps its name.
void remove_checkpoint(const std::filesystem::path& folder);
/// Renames the damaged checkpoint `folder` of a run to damaged-step-N, so that it neither counts as
/// a checkpoint of the run nor is removed like one. Its states on NVMe become free. Returns the new
/// name. Throws Error(io).
std::filesystem::path set_aside(const std::filesystem::path& folder);
/// Removes checkpoints of `run` after step `step`, because the run has gone back to that step. Logs
/// a line for each. Throws Error(io).
void remove_later(const std::filesystem::path& run, std::uint64_t step);
/// Removes checkpoints of `run` that are older than `newest`, so that `keep` remain including it.
/// Throws Error(io).
void remove_older(const std::filesystem::path& run, const std::filesystem::path& newest,
                  std::uint64_t keep);
/// Removes all checkpoints of a run. Best effort.
void remove_checkpoints(const std::filesystem::path& run);
/// Returns whether `path`, in the folder of checkpoints, has the name of one that was being written
/// or removed.
bool is_leftover(const std::filesystem::path& path);
/// Removes what killed processes have left while writing or removing checkpoints.
void remove_incomplete(const std::filesystem::path& checkpoints);
/// Removes the swap files of `run` in `directory` with the step of a checkpoint that does not
/// exist: a killed process has left them. Call it while no checkpoint is being written.
void remove_left_names(const std::filesystem::path& run, const std::filesystem::path& directory);
/// Returns the swap files to which the checkpoint `folder` refers outside of it.
std::vector<std::filesystem::path> files_elsewhere(const std::filesystem::path& folder);
/// Returns the folders of checkpoints of `run`, including incomplete, removed and damaged ones.
std::vector<std::filesystem::path> all_folders(const std::filesystem::path& run);
/// Returns the folder in which a checkpoint is written.
std::filesystem::path incomplete(const std::filesystem::path& folder);

/// Returns the end of a message about the damaged checkpoint `folder` of a copied run: where its
/// states were, and how to copy them. "" if it has no states in the swap files of another run.
std::string advice_for_copy(const std::filesystem::path& folder);

}  // namespace ballast::checkpoint
