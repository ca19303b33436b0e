#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "ballast/comm/communicator.h"
#include "ballast/config/config.h"
#include "ballast/config/resumption.h"
#include "ballast/engine/engine.h"

#include "src/checkpoint/checkpoint.h"
#include "src/checkpoint/writer.h"
#include "src/train/run_engine.h"

namespace ballast::train {

/// Where a run goes on.
struct Resumed {
  checkpoint::CheckpointFacts facts;
  std::filesystem::path folder;              ///< of the checkpoint; "" for a run that begins
  std::vector<config::Change> changes = {};  ///< that were allowed
};

/// Settings that determine the results of a run that resumes, and the names of --allow-change.
struct SettingsCheck {
  const config::Settings& settings;
  const std::vector<std::string>& allowed;
};

/// Starts `engine` with the states of `from`, a checkpoint or a run directory: its newest whole one
/// that has fewer than `before` steps. `found`, if any, is called before the states are read.
/// Compares the settings by `check`; null for a run that goes back to its own checkpoint.
/// Collective. Throws Error(data) if there is none or it is of another model, Error(config) if the
/// config has another batch, fewer steps, or other settings that are not allowed.
Resumed resume_run(engine::Engine& engine, const config::Config& config,
                   const std::filesystem::path& from, comm::Ranks* ranks,
                   std::uint64_t before = std::numeric_limits<std::uint64_t>::max(),
                   const std::function<void(const Resumed&)>& found = {},
                   const SettingsCheck* check = nullptr);

/// Throws Error(io) if the file system of the run directory lacks the space for its checkpoints and
/// one that is being written. `new_swap_files`: the run has yet to make its swap files, which count
/// if they will be there. Does nothing without checkpoints, and on other ranks than 0.
void check_room_for_checkpoints(const engine::Engine& engine, const config::Config& config,
                                comm::Ranks* ranks, bool new_swap_files);

/// When a run writes checkpoints, and when signals end it.
class RunCheckpoints {
 public:
  /// `stop` and `now` (may be null): see trainer.h. Everything must outlive the object.
  RunCheckpoints(RestartableEngine& engine, const config::Config& config, comm::Ranks* ranks,
                 const std::atomic<bool>* stop, std::atomic<bool>* now)
      : engine_(engine), config_(config), ranks_(ranks), stop_(stop), now_(now) {}

  /// Whether the config asks for checkpoints. Otherwise a signal ends the run in mid step.
  static bool wanted(const config::Config& config) { return config.ballast.writes_checkpoints(); }

  struct Done {
    bool stops = false;  ///< a signal ends the run
    bool began = false;  ///< a checkpoint, for which all updates were awaited
    bool wrote = false;  ///< newest() is another one
  };
  /// After a step: begins a checkpoint of `facts` if one is due or asked for, or if the run is to
  /// stop, and ends the one that was written in the background. The last one of a run is not left
  /// to the background. If the disk is full or memory short, it logs a warning at the first,
  /// second, fourth, eighth, ... failure and the run goes on; a run that is to stop throws. Throws
  /// StepFailure. Collective.
  Done after_step(std::uint64_t step, const std::function<checkpoint::CheckpointFacts()>& facts);
  /// Waits for the one in the background, before the run goes back or ends with an error. Returns
  /// whether newest() is another one. Throws StepFailure. Collective.
  bool settle() { return settle(After::failure); }
  /// The run continues from this checkpoint of its own.
  void continue_from(std::filesystem::path folder, std::uint64_t step) {
    newest_ = std::move(folder);
    newest_step_ = step;
  }

  /// The newest one that this run has written or continues from, and its step; "" before.
  [[nodiscard]] const std::filesystem::path& newest() const { return newest_; }
  [[nodiscard]] std::uint64_t newest_step() const { return newest_step_; }
  /// It has this place now; "": it was deleted.
  void newest_is(std::filesystem::path folder) { newest_ = std::move(folder); }

 private:
  /// What comes after a checkpoint.
  enum class After {
    training,
    end,     ///< a signal ends the run: it does not end without its checkpoint
    failure  ///< the run goes back or ends with an error
  };
  struct Requests {
    bool stop = false;
    bool now = false;
    bool written = true;  ///< what is in the background
  };
  [[nodiscard]] Requests requests();
  /// Whether the time between two checkpoints has passed. The first step starts the clock.
  [[nodiscard]] bool time_is_up();
  void begin(const checkpoint::CheckpointFacts& facts, After after);
  bool settle(After after);
  /// Calls `work` for the checkpoint of `step`, which may fail. Returns whether it did not.
  template <class Work>
  bool attempt(std::uint64_t step, After after, Work work);
  void fail(std::uint64_t step, After after, const std::string& why);

  RestartableEngine& engine_;
  const config::Config& config_;
  comm::Ranks* ranks_;
  const std::atomic<bool>* stop_;
  std::atomic<bool>* now_;
  std::optional<std::chrono::steady_clock::time_point> since_;  ///< the last attempt
  std::optional<checkpoint::CheckpointWriter> writer_;          ///< in the background
  std::filesystem::path newest_;
  std::uint64_t newest_step_ = 0;
  std::uint64_t failures_ = 0;  ///< since the last one that was written
};

}  // namespace ballast::train
