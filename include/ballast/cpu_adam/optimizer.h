#pragma once

#include <cstdint>
#include <string_view>

namespace ballast::cpu_adam {

/// Update rules. Formulas and sources: cpu_adam/README.md.
enum class Optimizer : std::uint8_t {
  adamw,    ///< Adam with decoupled weight decay
  adam,     ///< Adam with weight decay as part of the gradient (L2)
  adagrad,  ///< sum of squares instead of moments; weight decay as part of the gradient
  lion,     ///< sign of an interpolated moment; decoupled weight decay
  sgd,      ///< momentum, optionally Nesterov's; weight decay as part of the gradient
};

/// "adamw", "adam", "adagrad", "lion", "sgd".
std::string_view to_string(Optimizer optimizer) noexcept;

/// Inverse of to_string. Throws Error(usage) naming the choices.
Optimizer parse_optimizer(std::string_view name);

/// Whether the rule keeps a first moment (adagrad does not) and a second one (lion and sgd do not).
/// Pointers to a moment that is not kept are ignored and may be null.
constexpr bool has_first_moment(Optimizer optimizer) {
  return optimizer != Optimizer::adagrad;
}
constexpr bool has_second_moment(Optimizer optimizer) {
  return optimizer != Optimizer::lion && optimizer != Optimizer::sgd;
}

/// Hyper-parameters of one update. Members that the optimizer does not use are ignored.
struct Hyper {
  Optimizer optimizer = Optimizer::adamw;
  double learning_rate = 1e-3;
  double beta1 = 0.9;     ///< for adamw, adam, lion
  double beta2 = 0.999;   ///< for adamw, adam, lion
  double epsilon = 1e-8;  ///< for adamw, adam, adagrad
  double momentum = 0.9;  ///< sgd
  bool nesterov = false;  ///< sgd
  double weight_decay = 0.0;
  /// Number of this update, from 1; enters the bias corrections and stochastic rounding.
  std::int64_t step = 1;
  /// Every gradient is multiplied by this first: the clip coefficient over the loss scale.
  float gradient_scale = 1.0F;
};

}  // namespace ballast::cpu_adam
