#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ballast/model/architecture.h"
#include "ballast/model/family.h"

namespace ballast::model {

/// The losses of the routers, each times its coefficient.
struct RouterLosses {
  double balance = 0.0;  ///< coefficient of the load-balancing loss
  double z = 0.0;        ///< coefficient of the z-loss
};
/// Returns the coefficients in the config; zeros for families without experts.
RouterLosses router_losses(const ModelConfig& config);

/// The widest sum over rows of the experts' parts of a model, their biases and logits included; 0
/// without experts.
std::uint64_t widest_of_experts(const ModelConfig& config);

/// The built-in families whose layers have experts.
std::vector<std::unique_ptr<const Family>> families_with_experts();

}  // namespace ballast::model
