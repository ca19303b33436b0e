#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ballast/model/architecture.h"
#include "ballast/model/family.h"

namespace ballast::model {

/// Coefficients of the router losses.
struct RouterLosses {
  double balance = 0.0;  ///< coefficient of the load-balancing loss
  double z = 0.0;        ///< coefficient of the z-loss
};
/// Returns the coefficients in the config; zeros for families without experts.
RouterLosses router_losses(const ModelConfig& config);

/// Width of the widest sum over rows in the experts' part of a model, including biases and logits;
/// 0 without experts.
std::uint64_t widest_of_experts(const ModelConfig& config);

/// The built-in families whose layers have experts.
std::vector<std::unique_ptr<const Family>> families_with_experts();

}  // namespace ballast::model
