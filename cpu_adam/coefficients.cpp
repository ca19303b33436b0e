#include "cpu_adam/coefficients.h"

#include <cmath>

namespace ballast::cpu_adam {
namespace {

/// The finaliser of SplitMix64. Source: Steele, Lea & Flood, "Fast splittable pseudorandom number
/// generators", OOPSLA 2014, section 4.
std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}

/// Interpolates from the nearer end, like torch.lerp.
void set_first_weight(Coefficients& k, double weight) {
  k.first_weight = static_cast<float>(weight);
  k.first_from_end = k.first_weight >= 0.5F;
  if (k.first_from_end) k.first_weight -= 1.0F;
}

}  // namespace

Coefficients coefficients_of(const Hyper& hyper) {
  Coefficients k{};
  k.gradient_scale = hyper.gradient_scale;
  k.decay = static_cast<float>(1.0 - hyper.learning_rate * hyper.weight_decay);
  k.l2 = static_cast<float>(hyper.weight_decay);
  k.second_decay = static_cast<float>(hyper.beta2);
  k.second_weight = static_cast<float>(1.0 - hyper.beta2);
  k.momentum = static_cast<float>(hyper.momentum);
  k.nesterov = hyper.nesterov;
  double epsilon = hyper.epsilon;
  double step_size = hyper.learning_rate;
  if (hyper.optimizer == Optimizer::lion) {
    k.first_weight = static_cast<float>(1.0 - hyper.beta1);
  } else {
    set_first_weight(k, 1.0 - hyper.beta1);
  }
  if (hyper.optimizer == Optimizer::adamw || hyper.optimizer == Optimizer::adam) {
    const auto step = static_cast<double>(hyper.step);
    const double correction2 = std::sqrt(1.0 - std::pow(hyper.beta2, step));
    step_size *= correction2 / (1.0 - std::pow(hyper.beta1, step));
    epsilon *= correction2;
  }
  k.epsilon = static_cast<float>(epsilon);
  k.step_size = static_cast<float>(-step_size);
  return k;
}

void key_draws(Coefficients& coefficients, std::int64_t step, std::uint32_t upper_element) {
  constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15U;
  const std::uint64_t key = mix(mix(static_cast<std::uint64_t>(step) * kGolden) + upper_element);
  coefficients.draw_key[0] = static_cast<std::uint32_t>(key);
  coefficients.draw_key[1] = static_cast<std::uint32_t>(key >> 32);
}

}  // namespace ballast::cpu_adam
