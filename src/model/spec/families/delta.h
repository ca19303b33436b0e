#pragma once

#include <memory>
#include <vector>

#include "ballast/model/family.h"

namespace ballast::model {

/// Returns the families with gated delta nets (DeltaSpec).
std::vector<std::unique_ptr<const Family>> families_with_delta_nets();

/// Returns whether layers of such models have gated delta nets, which need whole sequences on one
/// rank.
bool has_delta_nets(const ModelConfig& config);

}  // namespace ballast::model
