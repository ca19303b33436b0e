#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ballast/step/labels.h"
#include "ballast/step/plans.h"

namespace ballast::step {

/// Runs plans operation by operation on the symbolic memory of one rank. Operations do with bytes
/// what the engine does. What they must find follows from the step program in serial order: an
/// operation that reads something else (another block, an old version, a gradient that lacks a
/// micro-batch), that writes beyond its buffer, or that has an argument of which it needs nothing,
/// is reported; so is what nobody reads. The interpreter knows no kernel, and nothing of how plans
/// are built. It ends with the run in which it has found something.
/// `seed` draws the rank, and which experts have rows.
std::vector<std::string> find_faults(const Problem& problem, const Placement& placement,
                                     const Options& options, const Schedule& schedule,
                                     const std::vector<const Plan*>& runs, std::uint64_t seed);

}  // namespace ballast::step
