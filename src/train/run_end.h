#pragma once

#include <cstdint>

#include "ballast/config/config.h"

namespace ballast::train {

/// The end of a run: which step is its last one, and what must then be there. Nobody else compares
/// steps with ballast.steps.
class RunEnd {
 public:
  explicit RunEnd(const config::Config& config)
      : steps_(config.ballast.steps),
        saves_weights_(config.ballast.save_weights),
        writes_checkpoints_(config.ballast.writes_checkpoints()) {}

  /// Number of steps, which is the number of the last step.
  [[nodiscard]] std::uint64_t steps() const { return steps_; }
  [[nodiscard]] bool is_last(std::uint64_t step) const { return step == steps_; }
  /// Whether a run with `done` finished steps has no further step.
  [[nodiscard]] bool is_reached_by(std::uint64_t done) const { return done >= steps_; }
  /// Number of steps after `done` finished ones.
  [[nodiscard]] std::uint64_t left_after(std::uint64_t done) const {
    return is_reached_by(done) ? 0 : steps_ - done;
  }

  /// Whether nothing is left to do after the last step. `weights`: they are saved. `checkpoint`:
  /// the last step has one. It is the only result of a run that does not save weights.
  [[nodiscard]] bool is_complete(bool weights, bool checkpoint) const {
    return saves_weights_ ? weights : checkpoint || !writes_checkpoints_;
  }

 private:
  std::uint64_t steps_;
  bool saves_weights_;
  bool writes_checkpoints_;
};

}  // namespace ballast::train
