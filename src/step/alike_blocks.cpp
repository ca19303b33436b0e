#include "src/step/alike_blocks.h"

#include <algorithm>

namespace ballast::step {
namespace {

bool are_alike(const PlacedProblem& placed, std::uint32_t a, std::uint32_t b) {
  const BlockSizes& of_a = placed.problem.blocks[a];
  const BlockSizes& of_b = placed.problem.blocks[b];
  const auto& program = placed.problem.program().blocks;
  const auto same = [](const SubGroup& one, const SubGroup& other) {
    return one.state_bytes == other.state_bytes;
  };
  return placed.device_of(a) == placed.device_of(b) && placed.at(a) == placed.at(b) &&
         of_a.weight_bytes == of_b.weight_bytes &&
         of_a.dequantized_bytes == of_b.dequantized_bytes &&
         of_a.gradient_bytes == of_b.gradient_bytes && of_a.replicated == of_b.replicated &&
         program[a].per_rank == program[b].per_rank && program[a].selected == program[b].selected &&
         program[a].row_gradients == program[b].row_gradients &&
         std::equal(of_a.sub_groups.begin(), of_a.sub_groups.end(), of_b.sub_groups.begin(),
                    of_b.sub_groups.end(), same);
}

}  // namespace

std::vector<AlikeBlocks> find_alike(const PlacedProblem& placed, bool merges) {
  std::vector<AlikeBlocks> found;
  std::size_t last = 0;  // Most blocks are like the one before them.
  for (std::uint32_t b = 0; b < placed.blocks(); ++b) {
    const auto has_alike = [&](const AlikeBlocks& blocks) {
      return are_alike(placed, blocks.first, b);
    };
    if (merges && b > 0 && !has_alike(found[last])) {
      last = static_cast<std::size_t>(std::ranges::find_if(found, has_alike) - found.begin());
    }
    if (merges && last < found.size()) {
      ++found[last].count;
    } else {
      last = found.size();
      found.push_back({b});
    }
  }
  return found;
}

}  // namespace ballast::step
