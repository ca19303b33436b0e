#pragma once

#include "ballast/cpu_adam/optimizer.h"

#include "cpu_adam/variant.h"

namespace ballast::cpu_adam {

Coefficients coefficients_of(const Hyper& hyper);

/// Sets the key of stochastic rounding for the elements whose number has these upper 32 bits.
void key_draws(Coefficients& coefficients, std::int64_t step, std::uint32_t upper_element);

}  // namespace ballast::cpu_adam
