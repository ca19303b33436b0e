#pragma once

#include <string>

#include "ballast/step/placement.h"
#include "ballast/step/problem.h"

namespace ballast::step {

/// Throws Error(config) for arguments that build() refuses.
void check_arguments(const Problem& problem, const Placement& placement, const Options& options);
/// Refuses plans that an evaluation does not have.
void check_trains(const Options& options);
[[noreturn]] void refuse_arguments(const std::string& message);

}  // namespace ballast::step
