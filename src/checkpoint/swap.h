#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "ballast/engine/saved_states.h"
#include "ballast/text/json.h"

namespace ballast::checkpoint {

// States on NVMe are not copied into a checkpoint. They stay in the swap files of the run, which
// get a further name: rank-R.swap-P in the folder of the checkpoint or, if that is on another file
// system than the swap files, ballast-ID-rank-R.swap-P beside them.

/// The name of a rank's swap files in the folder of a checkpoint, without -P.
std::string swap_name(std::uint32_t rank);
/// The same beside the swap files; `folder`: the checkpoint's final name.
std::string swap_name_elsewhere(const std::filesystem::path& folder, std::uint32_t rank);

/// `kept`, with names of files in the folder of the checkpoint without that folder.
text::Json json_of(const engine::KeptStates& kept);
/// The same read from the file `path` in the folder of a checkpoint. Throws Error(data) naming it.
engine::KeptStates kept_states_of(const text::Json& json, const std::filesystem::path& path);

/// Removes the folder of a checkpoint at once: first its name, so that no part of it is found, then
/// its files, also those elsewhere. Does nothing if there is none. Throws Error(io) if it keeps its
/// name.
void remove_checkpoint(const std::filesystem::path& folder);
/// Renames the damaged checkpoint `folder` of a run to damaged-step-N, so that it neither counts as
/// one of the run nor is removed with them. Its states on NVMe become free. Returns the new name.
/// Throws Error(io).
std::filesystem::path set_aside(const std::filesystem::path& folder);
/// Removes checkpoints of `run` after step `step`, with a line of log for each: the run has gone
/// back to that step. Throws Error(io).
void remove_later(const std::filesystem::path& run, std::uint64_t step);
/// Removes checkpoints of `run` that are older than `newest`, so that `keep` remain with it. Throws
/// Error(io).
void remove_older(const std::filesystem::path& run, const std::filesystem::path& newest,
                  std::uint64_t keep);
/// Removes all checkpoints of a run. Best effort.
void remove_checkpoints(const std::filesystem::path& run);
/// Whether `path`, in the folder of checkpoints, has the name of one that a process was writing or
/// removing.
bool is_leftover(const std::filesystem::path& path);
/// Removes what processes have left that were killed while they wrote or removed checkpoints.
void remove_incomplete(const std::filesystem::path& checkpoints);
/// The folder in which a checkpoint is written.
std::filesystem::path incomplete(const std::filesystem::path& folder);

}  // namespace ballast::checkpoint
