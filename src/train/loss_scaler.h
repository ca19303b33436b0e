#pragma once

#include <cstdint>
#include <optional>

#include "ballast/checkpoint/checkpoints.h"
#include "ballast/config/config.h"

namespace ballast::train {

/// The factor of the gradients of the next step (engine::Engine::train_step()). A function of which
/// steps were skipped, which all ranks know. The rules are those of DeepSpeed's DynamicLossScaler:
/// an overflow halves the scale, unless it is one of the first `hysteresis` - 1 since these were
/// last restored; a good step after `loss_scale_window` others in a row doubles it and restores the
/// hysteresis, which every good step does with `consecutive_hysteresis`.
class LossScaler {
 public:
  /// Without fp16 the scale is 1; it is constant, too, if `loss_scale` gives one.
  explicit LossScaler(const config::Config& config);

  [[nodiscard]] double scale() const { return now_.scale; }
  /// Whether an overflow may change the scale.
  [[nodiscard]] bool is_dynamic() const { return dynamic_; }
  /// Judges step `step`; `skipped`: a gradient was not finite. Throws Error(numeric) for an
  /// overflow at the smallest scale.
  void after_step(std::uint64_t step, bool skipped);

  /// For checkpoints; empty if the scale is constant.
  [[nodiscard]] std::optional<checkpoint::LossScale> state() const;
  /// Goes on with the state() of a checkpoint. Without one, or with a constant scale, nothing
  /// changes.
  void restart(const std::optional<checkpoint::LossScale>& state);

 private:
  config::Fp16Section options_;
  bool dynamic_;
  checkpoint::LossScale now_;
};

}  // namespace ballast::train
