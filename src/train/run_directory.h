#pragma once

#include <cstdint>
#include <filesystem>
#include <list>
#include <optional>

#include "ballast/comm/communicator.h"
#include "ballast/config/config.h"
#include "ballast/config/key_effects.h"
#include "ballast/core/memory.h"
#include "ballast/engine/engine.h"
#include "ballast/state/swap_plan.h"
#include "ballast/train/run_events.h"
#include "ballast/train/run_options.h"

#include "src/formats/new_folder.h"

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

/// Watches whether a directory keeps its name while files in it are written.
class RunPlace {
 public:
  enum class Fate : std::uint8_t {
    there,    ///< exists, or unknown, because the path cannot be checked now
    moved,    ///< it has another name
    deleted,  ///< its name is unused, or belongs to an empty directory
    replaced  ///< it was deleted, and another directory has its name
  };
  struct Whereabouts {
    Fate fate = Fate::there;
    std::filesystem::path now;  ///< the new path, if it was moved
  };

  /// Throws Error(io) if the directory cannot be opened.
  explicit RunPlace(std::filesystem::path directory);

  /// Looks up the directory with two system calls.
  [[nodiscard]] Whereabouts look() const;

 private:
  [[nodiscard]] Whereabouts find() const;

  std::filesystem::path directory_;
  Descriptor descriptor_;
};

/// The missing swap folders of a run or an evaluation, and the run directory on ranks that may be
/// on another machine. Those that are empty are removed at the end of this object, so it must
/// outlive the engine.
class RunFolders {
 public:
  /// Makes the folders, and logs one line for each swap folder that a config key names. Collective:
  /// throws on all ranks Error(io) that names the key if one rank cannot make its folder. `ranks`:
  /// null for one rank.
  RunFolders(const config::Config& config, const engine::Blueprint& blueprint, comm::Ranks* ranks);

  /// Lets the swap folders stay that a config key names.
  void keep();

 private:
  void make_swap_folders(const state::SwapOptions& options);

  std::list<formats::MadeDirectory> unnamed_;
  std::list<formats::MadeDirectory> named_;
};

}  // namespace ballast::train
