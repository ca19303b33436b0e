#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace ballast::cpu_adam {

/// Update rules, in the order of kOptimizers. Traces of tests have the numbers, so new rules are
/// appended.
enum class Optimizer : std::uint8_t { adamw, adam, adagrad, lion, sgd, adamax };

/// Hyper-parameters of one update. Members that the optimizer does not use are ignored.
struct Hyper {
  Optimizer optimizer = Optimizer::adamw;
  double learning_rate = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double momentum = 0.9;
  bool nesterov = false;
  double weight_decay = 0.0;
  /// Number of this update, from 1; enters the bias corrections and stochastic rounding.
  std::int64_t step = 1;
  /// Every gradient is multiplied by this first: the clip coefficient over the loss scale.
  float gradient_scale = 1.0F;
};

/// A parameter of an optimizer, as configs and torch call it: lr, betas, eps, weight_decay,
/// momentum or nesterov.
struct HyperParameter {
  std::string_view name;
  std::string_view meaning;
};
inline constexpr HyperParameter kRate = {"lr", "learning rate"};
inline constexpr HyperParameter kBetas = {"betas",
                                          "decay per step of the first and of the second moment"};
inline constexpr HyperParameter kEpsilon = {"eps", "added to the root of the second moment"};
inline constexpr HyperParameter kDecoupledDecay = {
    "weight_decay", "decoupled: share of a weight that a step of learning rate 1 subtracts"};
inline constexpr HyperParameter kDecayInGradient = {"weight_decay",
                                                    "added to the gradient, times the weight"};

/// The default of another tool for a parameter, as JSON.
struct OtherDefault {
  std::string_view parameter;
  std::string_view value;
};

/// Everything about an optimizer except its formula, which is the Rule of this type in
/// cpu_adam/kernel_rules.h. Configs, commands, Python, tests and manuals read these rows.
struct OptimizerRow {
  Optimizer type;
  std::string_view name;     ///< in commands, messages and files of the Python package
  std::string_view title;    ///< `optimizer.type` of configs; Offload{title} is the Python class
  std::string_view summary;  ///< continues the title in documentation
  /// Names of the moments in the states of torch's optimizer; empty for a moment that is not kept.
  std::string_view first_moment;
  std::string_view second_moment;
  Hyper defaults;
  std::array<HyperParameter, 4> parameters;  ///< in the order of the Python class

  bool in_torch = true;             ///< torch.optim has a class `title`
  bool counts_steps = true;         ///< states of torch's optimizer must have a "step"
  bool has_states_at_once = false;  ///< torch's optimizer makes its states before the first step
  std::string_view zero_keys = {};  ///< parameters of torch's class that must be 0 here
  std::string_view spellings = {};  ///< names in other tools, which errors translate to `title`
  std::array<OtherDefault, 2> deepspeed = {};  ///< defaults of DeepSpeed 0.19.8 that differ
  double usual_rate = 0.1;                     ///< larger learning rates are doubtful
  double usual_decay = 1.0;                    ///< larger weight decays are doubtful

  /// The meaning of a parameter; empty if the optimizer does not have it.
  [[nodiscard]] constexpr std::string_view meaning_of(std::string_view parameter) const {
    for (const HyperParameter& own : parameters) {
      if (own.name == parameter) return own.meaning;
    }
    return {};
  }
};

/// All optimizers. Sources of the defaults: torch.optim 2.15; Lion: its paper.
inline constexpr auto kOptimizers = std::to_array<OptimizerRow>({
    {.type = Optimizer::adamw,
     .name = "adamw",
     .title = "AdamW",
     .summary = "Adam with decoupled weight decay",
     .first_moment = "exp_avg",
     .second_moment = "exp_avg_sq",
     .defaults = {.optimizer = Optimizer::adamw, .weight_decay = 1e-2},
     .parameters = {{kRate, kBetas, kEpsilon, kDecoupledDecay}},
     .spellings = "adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused FusedAdam "
                  "DeepSpeedCPUAdam",
     .deepspeed = {{{"weight_decay", "0"}}}},
    {.type = Optimizer::adam,
     .name = "adam",
     .title = "Adam",
     .summary = "weight decay as part of the gradient (L2)",
     .first_moment = "exp_avg",
     .second_moment = "exp_avg_sq",
     .defaults = {.optimizer = Optimizer::adam},
     .parameters = {{kRate, kBetas, kEpsilon, kDecayInGradient}}},
    {.type = Optimizer::adagrad,
     .name = "adagrad",
     .title = "Adagrad",
     .summary = "a sum of squares instead of moments",
     .first_moment = "",
     .second_moment = "sum",
     .defaults = {.optimizer = Optimizer::adagrad, .learning_rate = 1e-2, .epsilon = 1e-10},
     .parameters = {{kRate, kDecayInGradient, {"eps", "added to the root of the sum of squares"}}},
     .has_states_at_once = true,
     .zero_keys = "lr_decay initial_accumulator_value",
     .spellings = "DeepSpeedCPUAdagrad",
     .usual_rate = 10.0},
    {.type = Optimizer::lion,
     .name = "lion",
     .title = "Lion",
     .summary = "the sign of an interpolated moment; decoupled weight decay",
     .first_moment = "exp_avg",
     .second_moment = "",
     .defaults = {.optimizer = Optimizer::lion, .learning_rate = 1e-4, .beta2 = 0.99},
     .parameters = {{kRate,
                     {"betas", "weight of the moment in the update, and its decay per step"},
                     kDecoupledDecay}},
     .in_torch = false,
     .counts_steps = false,
     .spellings = "lion_32bit FusedLion DeepSpeedCPULion",
     .deepspeed = {{{"lr", "0.001"}, {"betas", "[0.9,0.999]"}}},
     .usual_decay = 1e300},
    {.type = Optimizer::sgd,
     .name = "sgd",
     .title = "SGD",
     .summary = "momentum, optionally Nesterov's; weight decay as part of the gradient",
     .first_moment = "momentum_buffer",
     .second_moment = "",
     .defaults = {.optimizer = Optimizer::sgd, .momentum = 0.0},
     .parameters = {{kRate,
                     {"momentum", "decay per step of the moment; 0: no moment"},
                     kDecayInGradient,
                     {"nesterov", "Nesterov's momentum, which needs a momentum above 0"}}},
     .counts_steps = false,
     .zero_keys = "dampening",
     .usual_rate = 10.0},
    {.type = Optimizer::adamax,
     .name = "adamax",
     .title = "Adamax",
     .summary =
         "Adam with the largest recent gradient as its second moment; weight decay as part of "
         "the gradient",
     .first_moment = "exp_avg",
     .second_moment = "exp_inf",
     .defaults = {.optimizer = Optimizer::adamax, .learning_rate = 2e-3},
     .parameters = {{kRate,
                     {"betas", "decay per step of the first moment and of the largest gradient"},
                     {"eps", "added to the magnitude of each gradient"},
                     kDecayInGradient}}},
});
static_assert(std::ranges::all_of(kOptimizers, [](const OptimizerRow& row) {
  return &row == &kOptimizers.at(static_cast<std::size_t>(row.type)) &&
         row.defaults.optimizer == row.type;
}));

constexpr const OptimizerRow& row_of(Optimizer optimizer) {
  return kOptimizers[static_cast<std::size_t>(optimizer)];
}

constexpr std::string_view to_string(Optimizer optimizer) noexcept {
  return row_of(optimizer).name;
}

/// Pointers to a moment that is not kept are ignored and may be null.
constexpr bool has_first_moment(Optimizer optimizer) {
  return !row_of(optimizer).first_moment.empty();
}
constexpr bool has_second_moment(Optimizer optimizer) {
  return !row_of(optimizer).second_moment.empty();
}

/// The names of all optimizers.
std::vector<std::string> optimizer_names();

/// Inverse of to_string. Throws Error(usage) naming the choices.
Optimizer parse_optimizer(std::string_view name);

}  // namespace ballast::cpu_adam
