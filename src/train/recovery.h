#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "ballast/comm/communicator.h"
#include "ballast/config/config.h"
#include "ballast/core/error.h"

#include "src/train/run_checkpoints.h"
#include "src/train/run_engine.h"

namespace ballast::train {

/// Most times in a row that a run goes back after errors without a new checkpoint between them.
inline constexpr std::uint64_t kMostResumes = 3;

/// Decides whether a run goes back to its newest checkpoint (ballast.on_error, ballast.spike) and
/// says what a run that ends leaves to go on from. The same on all ranks.
class Recovery {
 public:
  /// `command`: the one that resumes the run, "" if unknown. `world`: number of ranks.
  Recovery(const config::Config& config, std::string command, std::uint64_t world)
      : config_(config), command_(std::move(command)), world_(world) {}

  /// The checkpoint that the run would go back to, of `step` steps.
  void checkpoint_is(std::filesystem::path folder, std::uint64_t step);
  /// Goes back, for `reason`, to the newest whole checkpoint of fewer than `before` steps, with a
  /// new engine, and says so in one warning. `skip`: the data of the steps since then are left out.
  /// Collective. Throws StepFailure of the new engine; Error or JointError with the reason if there
  /// is no checkpoint to go back to, which rethrow() then does not name either.
  Resumed go_back(RestartableEngine& engine, comm::Ranks* ranks, const std::string& reason,
                  std::uint64_t before, bool skip);
  /// The run directory has another name, which command() lacks.
  void forget_command() { command_.clear(); }
  /// A new one was written: the counts of failures and rollbacks start again.
  void made_progress();

  /// The run goes back after `failure` of step `step`, for the reason that is returned. Otherwise
  /// rethrows.
  std::string after_failure(std::uint64_t step, const StepFailure& failure);
  /// The same for a rollback after the spike `what`. Throws Error(numeric) for the action `stop`.
  std::string after_spike(std::uint64_t step, const std::string& what);

  /// Rethrows `error` with the newest checkpoint, if there is one to resume from, and the command.
  /// A failure of the swap space may have damaged what the checkpoint keeps there.
  [[noreturn]] void rethrow(const Error& error) const;

 private:
  [[noreturn]] void refuse_to_go_back(const std::string& reason, const Error& error);

  const config::Config& config_;
  std::string command_;
  std::uint64_t world_;
  std::filesystem::path newest_;
  std::uint64_t newest_step_ = 0;
  std::uint64_t resumes_ = 0;
  std::uint64_t rollbacks_ = 0;
};

}  // namespace ballast::train
