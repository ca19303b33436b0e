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

/// Maximum number of consecutive returns after errors without a new checkpoint between them.
inline constexpr std::uint64_t kMaxResumes = 3;

/// Decides whether a run goes back to its latest checkpoint (ballast.on_error, ballast.spike), and
/// describes in errors what a run that ends can continue from. Decisions are equal on all ranks.
class Recovery {
 public:
  /// `command`: resumes the run; "" if unknown. `world`: number of ranks.
  Recovery(const config::Config& config, std::string command, std::uint64_t world)
      : config_(config), command_(std::move(command)), world_(world) {}

  /// Sets the checkpoint that the run would go back to, and its number of steps.
  void checkpoint_is(std::filesystem::path folder, std::uint64_t step);
  /// Goes back to the latest complete checkpoint of fewer than `before` steps, with a new engine,
  /// and logs one warning with `reason`. `skip`: skip the data of the steps since then. Collective.
  /// Throws StepFailure of the new engine. Throws Error or JointError with the reason if there is
  /// no such checkpoint, so that rethrow() does not mention one either.
  ResumedRun go_back(RestartableEngine& engine, comm::Ranks* ranks, const std::string& reason,
                     std::uint64_t before, bool skip);
  /// The run directory was renamed, so the command is no longer valid.
  void forget_command() { command_.clear(); }
  /// A new checkpoint was written: resets the counts of failures and rollbacks.
  void made_progress();

  /// Decides to go back after `failure` of step `step` and returns the reason, or rethrows.
  std::string after_failure(std::uint64_t step, const StepFailure& failure);
  /// Decides to go back after the spike `what` and returns the reason. Throws Error(numeric) for
  /// the action `stop`.
  std::string after_spike(std::uint64_t step, const std::string& what);

  /// Rethrows `error` with the latest checkpoint, if the run can resume from one, and the command.
  /// A failure of the swap space may have damaged the parts of a checkpoint that are stored there.
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
