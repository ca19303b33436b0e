#pragma once

#include <memory>
#include <vector>

#include "ballast/model/family.h"

namespace ballast::model {

/// Returns the families with latent attention (LatentSpec).
std::vector<std::unique_ptr<const Family>> families_with_latent_attention();

}  // namespace ballast::model
