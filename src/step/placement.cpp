#include "ballast/step/placement.h"

#include <algorithm>

#include "ballast/step/deal.h"
#include "ballast/step/rank_sizes.h"

namespace ballast::step {

bool written_in_background(const Placement& placement, std::uint64_t kept) {
  const auto is_used = [&](Tier tier) {
    return std::any_of(placement.blocks.begin(), placement.blocks.end(), [tier](const auto& block) {
      return block.weights == tier || block.optimizer == tier;
    });
  };
  return is_used(Tier::host) && (kept > 1 || !is_used(Tier::nvme));
}

bool in_one_pass(const Problem& problem, const Placement& placement) {
  const std::optional<model::OnePassHead>& choice = problem.program().one_pass;
  if (!choice) return true;
  if (placement.blocks[choice->keeper].kept != Kept::all) return false;
  const RankSizes sizes(problem);
  std::vector<std::uint8_t> dealt(problem.blocks.size(), 0);
  if (problem.devices > 1) dealt = deal(problem.program(), problem.devices);
  return std::all_of(choice->on_device.begin(), choice->on_device.end(), [&](model::BlockId block) {
    return placement.blocks[block].weights == Tier::device && !sizes.shards_weights(block) &&
           dealt[block] == dealt[choice->keeper];
  });
}

}  // namespace ballast::step
