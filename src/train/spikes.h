#pragma once

#include <cstddef>
#include <deque>
#include <string>
#include <vector>

#include "ballast/config/config.h"

namespace ballast::train {

/// Finds jumps of the loss (ballast.spike). A step is in a spike if its loss is not finite or
/// exceeds the mean of the losses of the last `window` steps by `factor` standard deviations, once
/// the window is half full. The rule is that of OLMo-core's SkipStepOptimizer, whose factor is 6
/// too. A function of the losses alone, which are the same on all ranks.
class Spikes {
 public:
  explicit Spikes(const config::SpikeSection& options) : options_(options) {}

  /// Adds the loss of the next step. Returns what is wrong with it if a spike begins ("loss 9.1 is
  /// above 3.3, ..."); "" for other steps, those inside a spike included.
  std::string add(double loss);

  /// The losses that count, the oldest first; empty if the config asks for nothing.
  [[nodiscard]] std::vector<double> losses() const { return {losses_.begin(), losses_.end()}; }
  /// Goes on after the step that had these losses().
  void restart(const std::vector<double>& losses);

 private:
  /// What is wrong with a loss; "" if nothing is.
  [[nodiscard]] std::string judge(double loss) const;

  config::SpikeSection options_;
  std::deque<double> losses_;  ///< finite ones
  bool inside_ = false;        ///< the last step was in a spike
};

}  // namespace ballast::train
