#pragma once

#include <cstdint>
#include <vector>

#include "src/step/placed_problem.h"

namespace ballast::step {

/// Blocks of one device with equal sizes and placements.
struct AlikeBlocks {
  std::uint32_t first = 0;
  std::uint32_t count = 1;
};

/// Returns all blocks. Alike ones are together if `merges`: planners sum the buffers of thousands
/// of placements, and a model may have thousands of experts.
std::vector<AlikeBlocks> find_alike(const PlacedProblem& placed, bool merges);

}  // namespace ballast::step
