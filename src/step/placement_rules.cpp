#include "src/step/placement_rules.h"

#include <algorithm>

#include "ballast/step/rank_sizes.h"

namespace ballast::step {

bool splits_home(const Problem& problem, const Placement& placement, const Options& options,
                 std::uint32_t block) {
  const RankSizes sizes(problem);
  return options.purpose == Purpose::training && placement.blocks[block].weights == Tier::nvme &&
         !problem.blocks[block].is_frozen() && sizes.updated_by_all(block) < sizes.weights(block);
}

Tier trained_tier(const BlockPlacement& place) {
  return place.optimizer == Tier::nvme ? Tier::nvme : Tier::host;
}

bool swaps_gradient(const Problem& problem, const Placement& placement, std::uint32_t block) {
  const BlockPlacement& place = placement.blocks[block];
  return !problem.blocks[block].is_frozen() && place.optimizer != Tier::device &&
         place.gradients == Tier::nvme;
}

UpdatedIn update_pass(const Placement& placement, const Options& options, std::uint32_t block) {
  const bool gated = options.update == Update::gated && !placement.blocks[block].speculates;
  return gated ? UpdatedIn::forward : UpdatedIn::backward;
}

std::vector<SwappedStates> swapped_states(const Problem& problem, const Placement& placement,
                                          const Options& options, UpdatedIn pass) {
  std::vector<SwappedStates> swapped;
  const auto blocks = static_cast<std::uint32_t>(placement.blocks.size());
  for (std::uint32_t i = 0; i < blocks; ++i) {
    const std::uint32_t b = pass == UpdatedIn::forward ? i : blocks - 1 - i;
    if (placement.blocks[b].optimizer != Tier::nvme) continue;
    if (update_pass(placement, options, b) != pass) continue;
    const auto groups = static_cast<std::uint32_t>(problem.blocks[b].sub_groups.size());
    for (std::uint32_t g = 0; g < groups; ++g) swapped.push_back({b, g});
  }
  return swapped;
}

Bytes swapped_gradient_bytes(const Problem& problem, std::uint32_t block) {
  return round_up(RankSizes(problem).updated_gradient(block), kPage);
}

}  // namespace ballast::step
