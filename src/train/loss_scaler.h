#pragma once

#include <cstdint>
#include <optional>

#include "ballast/checkpoint/checkpoints.h"
#include "ballast/config/config.h"

namespace ballast::train {

/// The loss scale of the next step (engine::Engine::train_step()). It depends only on which steps
/// were skipped, which all ranks know. The rules are those of DeepSpeed's DynamicLossScaler. An
/// overflow halves the scale, except the first `hysteresis` - 1 overflows since the hysteresis was
/// last restored. A good step after `loss_scale_window` good steps in a row doubles the scale and
/// restores the hysteresis. With `consecutive_hysteresis`, every good step restores it.
class LossScaler {
 public:
  /// Without fp16 the scale is 1. It is also constant if `loss_scale` sets it.
  explicit LossScaler(const config::Config& config);

  [[nodiscard]] double scale() const { return now_.scale; }
  /// Returns whether an overflow may change the scale.
  [[nodiscard]] bool is_dynamic() const { return dynamic_; }
  /// Updates the scale after step `step`. `skipped`: a gradient was not finite. Throws
  /// Error(numeric) for an overflow at the smallest scale.
  void after_step(std::uint64_t step, bool skipped);

  /// State for checkpoints; empty if the scale is constant.
  [[nodiscard]] std::optional<checkpoint::LossScale> state() const;
  /// Continues from the state() of a checkpoint. Does nothing without one, or if the scale is
  /// constant.
  void restart(const std::optional<checkpoint::LossScale>& state);

 private:
  config::Fp16Section options_;
  bool dynamic_;
  checkpoint::LossScale now_;
};

}  // namespace ballast::train
