#pragma once

#include <bit>
#include <cstdint>

namespace ballast::engine {

/// Decides when speculative updates pause. A step that is clipped or skipped repeats them, which
/// costs more than they save in several other steps. So they pause after half of the last 8 steps
/// were such steps, and resume when at most one was. Results do not depend on it, and all ranks
/// decide alike because all have the same norm.
class SpeculationPace {
 public:
  /// Notes a training step. `as_assumed`: it was neither clipped nor skipped.
  void note(bool as_assumed) {
    recent_ = static_cast<std::uint8_t>(recent_ << 1U | (as_assumed ? 0U : 1U));
    const int repeated = std::popcount(recent_);
    paused_ = repeated >= (paused_ ? 2 : 4);
  }
  [[nodiscard]] bool paused() const { return paused_; }

 private:
  std::uint8_t recent_ = 0;  ///< one bit per step, the last one lowest
  bool paused_ = false;
};

}  // namespace ballast::engine
