#include <algorithm>
#include <utility>
#include <vector>

#include "src/step/plan_types.h"
#include "tests/unit/step/interpreter.h"

// The part of Interpreter that knows what a rank has of a block, what homes of weights hold and how
// large the content of a buffer is.

namespace ballast::step::named {

bool Interpreter::several(std::uint32_t block) const {
  return work_.world > 1 && !work_.blocks[block].expert_parallel;
}

Content::Extent Interpreter::own(std::uint32_t block) const {
  return several(block) && work_.stage >= 1 ? Extent::shard : Extent::whole;
}

Content::Extent Interpreter::sums(std::uint32_t block) const {
  return own(block) == Extent::shard ? Extent::torn : Extent::whole;
}

Content::Extent Interpreter::home(std::uint32_t block) const {
  const bool split = several(block) && work_.stage >= 3 && !work_.blocks[block].keeps_whole;
  if (!split) return Extent::whole;
  return group() == work_.world ? Extent::shard : Extent::share;
}

Content::Extent Interpreter::torn_home(std::uint32_t block) const {
  return home(block) == Extent::share ? Extent::torn_share : Extent::torn;
}

std::uint32_t Interpreter::group() const {
  return work_.weight_ranks == 0 ? work_.world : work_.weight_ranks;
}

bool Interpreter::splits_home(std::uint32_t block) const {
  const BlockWork& work = work_.blocks[block];
  return trains() && is_trained(block) && problem_.placement.blocks[block].weights == Tier::nvme &&
         home(block) == Extent::whole &&
         part_of(work.gradient_bytes, Extent::whole, block) <
             part_of(work.weight_bytes, Extent::whole, block);
}

bool Interpreter::trained_on_host(std::uint32_t block) const {
  return splits_home(block) && problem_.placement.blocks[block].optimizer != Tier::nvme;
}

Content Interpreter::frozen_weights(std::uint32_t block) const {
  Content frozen = {What::weights, block, 0, 0, home(block)};
  frozen.frozen_only = true;
  return frozen;
}

Bytes Interpreter::part_of(Bytes whole, Extent extent, std::uint32_t block) const {
  if (!several(block)) return whole;
  // Shards are equal and whole pages, so all of them together may be larger than the block.
  constexpr Bytes kPageBytes = 4096;
  const Bytes pages = (whole + work_.world * kPageBytes - 1) / (work_.world * kPageBytes);
  const bool share = extent == Extent::share || extent == Extent::torn_share;
  const std::uint32_t shards = extent == Extent::shard ? 1
                               : share                 ? work_.world / group()
                                                       : work_.world;
  return shards * pages * kPageBytes;
}

std::vector<std::pair<BufferId, Content>> Interpreter::weight_homes(std::uint32_t block,
                                                                    std::uint64_t updates) const {
  Content all = {What::weights, block, 0, updates, home(block)};
  if (!splits_home(block)) return {{schedule_.weight_home[block], all}};
  all.trained_only = true;
  return {{schedule_.trained_home[block], all},
          {schedule_.weight_home[block], frozen_weights(block)}};
}

Bytes Interpreter::size(const Content& content) const {
  // Of rows of the head, `block` counts tiles.
  const auto last = static_cast<std::uint32_t>(work_.blocks.size() - 1);
  const std::uint32_t number = std::min(content.block, last);
  const BlockWork& block = work_.blocks[number];
  switch (content.what) {
    case What::nothing:
    case What::verdict:
      return 0;
    case What::weights:
      if (content.decoded) return block.decoded_bytes;
      return part_of(block.weight_bytes, content.extent, number);
    case What::states:
      return block.sub_groups.at(content.micro).state_bytes;
    case What::batch:
      return work_.batch_bytes;
    case What::intermediates:
      return block.intermediate_bytes;
    case What::activation:
    case What::flow:
      return work_.activation_bytes;
    case What::accumulator:
      return block.accumulator_bytes;
    case What::tied_accumulator:
      return work_.tied_accumulator_bytes;
    case What::normed:
    case What::head_rows:
      return work_.rows_bytes;
    case What::routing:
      return work_.routing_bytes;
    case What::routing_of_ranks:
      return work_.world * work_.routing_bytes;
    case What::router_totals:
      return work_.router_totals_bytes;
    case What::output_sums:
    case What::normed_gradient:
      return work_.row_sums_bytes;
    case What::packed:
    case What::reduced:
      return part_of(block.gradient_bytes, content.extent, number);
    case What::statistics:
      return work_.statistics_bytes;
    case What::losses:
      return work_.losses_bytes;
  }
  return 0;
}

/// What comes to the host for an update, or to be undone there, is only what is trained.
Bytes Interpreter::size_in(const Buffer& buffer, const Content& content) const {
  const bool has_part = content.frozen_only || content.trained_only || buffer.tier == Tier::nvme;
  if (content.what == What::weights && has_part && splits_home(content.block)) {
    const BlockWork& work = work_.blocks[content.block];
    if (!content.frozen_only) return part_of(work.gradient_bytes, content.extent, content.block);
    return part_of(work.weight_bytes, Extent::whole, content.block) -
           part_of(work.gradient_bytes, Extent::whole, content.block);
  }
  const bool for_update = content.what == What::weights && buffer.tier == Tier::host &&
                          (buffer.kind == Kind::undo ||
                           problem_.placement.blocks[content.block].weights == Tier::device);
  return for_update && home(content.block) == Extent::whole
             ? part_of(work_.blocks[content.block].gradient_bytes, content.extent, content.block)
             : size(content);
}

}  // namespace ballast::step::named
