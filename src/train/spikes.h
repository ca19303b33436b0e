#pragma once

#include <cstddef>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "ballast/config/config.h"

namespace ballast::train {

/// Finds loss spikes (ballast.spike). A step is in a spike if its loss is not finite, or exceeds
/// the mean loss of the last `window` steps by `factor` standard deviations, once the window is
/// half full. The rule is that of OLMo-core's SkipStepOptimizer, whose factor is 6 too. It depends
/// only on the losses, which are equal on all ranks.
class Spikes {
 public:
  explicit Spikes(const config::SpikeSection& options) : options_(options) {}

  /// Adds the loss of the next step. If a spike begins, returns its description ("loss 9.1 is above
  /// 3.3, ..."). Otherwise, also inside a spike, returns "". A step without a loss changes nothing.
  std::string add(std::optional<double> of_step);

  /// Losses in the window, oldest first; empty if ballast.spike is off.
  [[nodiscard]] std::vector<double> losses() const { return {losses_.begin(), losses_.end()}; }
  /// Continues after the step that had these losses().
  void restart(const std::vector<double>& losses);

 private:
  /// Describes the problem of a loss; "" if there is none.
  [[nodiscard]] std::string judge(double loss) const;

  config::SpikeSection options_;
  std::deque<double> losses_;  ///< only finite ones
  bool inside_ = false;        ///< the last step was in a spike
};

}  // namespace ballast::train
