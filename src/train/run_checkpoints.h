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
#include "ballast/config/key_effects.h"
#include "ballast/engine/engine.h"
#include "ballast/train/run_options.h"

#include "src/checkpoint/checkpoint.h"
#include "src/checkpoint/writer.h"
#include "src/train/run_engine.h"

namespace ballast::train {

/// The point from which a run continues.
struct ResumedRun {
  checkpoint::CheckpointFacts facts;
  std::filesystem::path folder;  ///< folder of the checkpoint; "" for a run that begins
  std::vector<config::SettingChange> changes = {};  ///< changed settings that were allowed
};

/// Settings that determine the results of a resumed run, and the names of --allow-change.
struct SettingsCheck {
  const config::Settings& settings;
  const std::vector<std::string>& allowed;
};

/// Starts `engine` with the states of `from`: a checkpoint, or the latest complete one of a run
/// directory with fewer than `before` steps. `found`, if given, is called before the states are
/// read. `check`: settings to compare; null for a run that goes back to its own checkpoint.
/// Collective. Throws Error(data) if there is no checkpoint or it is from another model,
/// Error(config) if the config has another batch, fewer steps, or other settings that are not
/// allowed.
ResumedRun resume_run(engine::Engine& engine, const config::Config& config,
                      const std::filesystem::path& from, comm::Ranks* ranks,
                      std::uint64_t before = std::numeric_limits<std::uint64_t>::max(),
                      const std::function<void(const ResumedRun&)>& found = {},
                      const SettingsCheck* check = nullptr);

/// Returns the checkpoint or run directory from which a run with these options resumes. "": it
/// begins.
std::filesystem::path resumed_from(const config::Config& config, const RunOptions& options);

/// Throws Error(io) if the file system of the run directory lacks space for its checkpoints and one
/// that is being written. `new_swap_files`: the run has not created its swap files yet, so they
/// count if they will be on that file system. Does nothing without checkpoints, and on ranks other
/// than 0.
void check_room_for_checkpoints(const engine::Engine& engine, const config::Config& config,
                                comm::Ranks* ranks, bool new_swap_files);

/// Decides when a run writes checkpoints, and when signals end it.
class RunCheckpoints {
 public:
  /// `stop` and `now` (may be null): see trainer.h. All arguments must outlive the object.
  RunCheckpoints(RestartableEngine& engine, const config::Config& config, comm::Ranks* ranks,
                 const std::atomic<bool>* stop, std::atomic<bool>* now)
      : engine_(engine), config_(config), ranks_(ranks), stop_(stop), now_(now) {}

  /// Returns whether the config asks for checkpoints. Otherwise a signal ends the run within a
  /// step.
  static bool wanted(const config::Config& config) { return config.ballast.writes_checkpoints(); }

  struct Done {
    bool stops = false;  ///< a signal ends the run
    bool began = false;  ///< a checkpoint was begun, for which all updates were awaited
    bool wrote = false;  ///< newest() has changed
  };
  /// Runs after each step: begins a checkpoint of `facts` if one is due or requested, or if the run
  /// is to stop, and completes the one in the background. The last checkpoint of a run is not
  /// written in the background. If the disk is full or memory is short, logs a warning at failures
  /// 1, 2, 4, 8, ... and at that of the last step, and the run continues; a run that is to stop
  /// throws. Throws StepFailure. Collective.
  Done after_step(std::uint64_t step, const std::function<checkpoint::CheckpointFacts()>& facts);
  /// Waits for the checkpoint in the background, before the run goes back or ends with an error.
  /// Returns whether newest() has changed. Throws StepFailure. Collective.
  bool settle() { return settle(After::failure); }
  /// The run continues from this checkpoint, which it has written.
  void continue_from(std::filesystem::path folder, std::uint64_t step) {
    newest_ = std::move(folder);
    newest_step_ = step;
  }

  /// The latest checkpoint that this run has written or continues from, and its step; "" before.
  [[nodiscard]] const std::filesystem::path& newest() const { return newest_; }
  [[nodiscard]] std::uint64_t newest_step() const { return newest_step_; }
  /// Whether the latest checkpoint is that of `step`.
  [[nodiscard]] bool has(std::uint64_t step) const {
    return !newest_.empty() && newest_step_ == step;
  }
  /// Sets the new place of the latest checkpoint; "": it was deleted.
  void newest_is(std::filesystem::path folder) { newest_ = std::move(folder); }

 private:
  /// Next event after a checkpoint.
  enum class After {
    training,
    checkpoint,  ///< the next checkpoint, of the step that has just ended
    last_step,   ///< the end of the run
    stop,        ///< the end of the run because of a signal, but not without its checkpoint
    failure      ///< the run goes back or ends with an error
  };
  struct Requests {
    bool stop = false;
    bool now = false;
    bool written = true;  ///< whether the checkpoint in the background is complete
  };
  [[nodiscard]] Requests requests();
  /// Returns whether the time between two checkpoints has passed. The first step starts the clock.
  [[nodiscard]] bool time_is_up();
  void begin(const checkpoint::CheckpointFacts& facts, After after);
  bool settle(After after);
  /// Calls `work` for the checkpoint of `step`. Returns whether it succeeded.
  template <class Work>
  bool attempt(std::uint64_t step, After after, Work work);
  void fail(std::uint64_t step, After after, const std::string& why);

  RestartableEngine& engine_;
  const config::Config& config_;
  comm::Ranks* ranks_;
  const std::atomic<bool>* stop_;
  std::atomic<bool>* now_;
  std::optional<std::chrono::steady_clock::time_point> since_;  ///< time of the last attempt
  std::optional<checkpoint::CheckpointWriter> writer_;          ///< checkpoint in the background
  std::filesystem::path newest_;
  std::uint64_t newest_step_ = 0;
  std::uint64_t failures_ = 0;  ///< failures since the last checkpoint that was written
};

/// Returns the config of a run with these options. If the run resumes from a checkpoint without
/// model.pad_token_id, as versions wrote that lack the key, it continues to train the row of that
/// token, unless options.allowed_changes names the key. Logs this on rank 0. Collective.
config::Config with_pad_token_of_checkpoint(const config::Config& config, const RunOptions& options,
                                            comm::Ranks* ranks);

/// Returns `config` with the numbers of tiles that it leaves open: those of the checkpoint from
/// which the run resumes, whatever its budgets, or else setup::settle_tiles(). Collective.
config::Config settle_tiles(const config::Config& config, comm::Ranks* ranks,
                            const std::atomic<bool>* interrupted, const RunOptions& options);

}  // namespace ballast::train
