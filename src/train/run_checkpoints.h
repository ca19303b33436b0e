#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>

#include "ballast/comm/communicator.h"
#include "ballast/config/config.h"
#include "ballast/engine/engine.h"

#include "src/train/checkpoint.h"

namespace ballast::train {

/// Where a run goes on.
struct Resumed {
  CheckpointFacts facts;
  std::filesystem::path folder;  ///< of the checkpoint; "" for a run that begins
};

/// Starts `engine` with the states of `from`, a checkpoint or a run directory (its newest whole
/// one). Collective. Throws Error(data) if there is none or it is of another model, Error(config)
/// if the config has another batch or no more steps.
Resumed resume_run(engine::Engine& engine, const config::Config& config,
                   const std::filesystem::path& from, comm::Ranks* ranks);

/// When a run writes checkpoints, and when signals end it.
class RunCheckpoints {
 public:
  /// `stop` and `now` (may be null): see trainer.h. Everything must outlive the object.
  RunCheckpoints(engine::Engine& engine, const config::Config& config, comm::Ranks* ranks,
                 const std::atomic<bool>* stop, std::atomic<bool>* now)
      : engine_(engine), config_(config), ranks_(ranks), stop_(stop), now_(now) {}

  /// Whether the config asks for checkpoints. Otherwise a signal ends the run in mid step.
  static bool wanted(const config::Config& config) { return config.ballast.checkpoint_every > 0; }

  /// After a step: writes a checkpoint of `facts` if one is due or asked for, or if the run is to
  /// stop. Returns whether it is. If the disk is full, for example, it logs a warning at the first,
  /// second, fourth, eighth, ... failure and the run goes on; a run that is to stop throws.
  /// Collective.
  bool after_step(std::uint64_t step, const std::function<CheckpointFacts()>& facts);

  /// The newest one that this run has written; "" before.
  [[nodiscard]] const std::filesystem::path& newest() const { return newest_; }
  /// How many were written.
  [[nodiscard]] std::uint64_t written() const { return written_; }

 private:
  struct Requests {
    bool stop = false;
    bool now = false;
  };
  [[nodiscard]] Requests requests() const;
  void write(const CheckpointFacts& facts, bool stopping);

  engine::Engine& engine_;
  const config::Config& config_;
  comm::Ranks* ranks_;
  const std::atomic<bool>* stop_;
  std::atomic<bool>* now_;
  std::filesystem::path newest_;
  std::uint64_t written_ = 0;
  std::uint64_t failures_ = 0;  ///< since the last one that was written
};

}  // namespace ballast::train
