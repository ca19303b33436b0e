#include <algorithm>
#include <utility>
#include <vector>

#include "tests/unit/schedule/interpreter.h"

// The part of Interpreter that knows what homes of weights hold and how large the content of a
// buffer is.

namespace ballast::schedule {

Bytes Interpreter::part_of(Bytes whole, Extent extent) const {
  if (work_.world == 1) return whole;
  // Shards are equal and whole pages, so all of them together may be larger than the block.
  constexpr Bytes kPageBytes = 4096;
  const Bytes pages = (whole + work_.world * kPageBytes - 1) / (work_.world * kPageBytes);
  const bool share = extent == Extent::share || extent == Extent::torn_share;
  const std::uint32_t shards = extent == Extent::shard ? 1
                               : share                 ? work_.world / group()
                                                       : work_.world;
  return shards * pages * kPageBytes;
}

bool Interpreter::splits_home(std::uint32_t block) const {
  const BlockWork& work = work_.blocks[block];
  return trains() && is_trained(block) && problem_.placement.blocks[block].weights == Tier::nvme &&
         home(block) == Extent::whole &&
         part_of(work.gradient_bytes, Extent::whole) < part_of(work.weight_bytes, Extent::whole);
}

std::vector<std::pair<BufferId, Content>> Interpreter::weight_homes(std::uint32_t block,
                                                                    std::uint64_t updates) const {
  Content all = {What::weights, block, 0, updates, home(block)};
  if (!splits_home(block)) return {{schedule_.weight_home[block], all}};
  all.trained_only = true;
  Content frozen = {What::weights, block, 0, 0, home(block)};
  frozen.frozen_only = true;
  return {{schedule_.trained_home[block], all}, {schedule_.weight_home[block], frozen}};
}

Bytes Interpreter::size(const Content& content) const {
  // Of rows of the head, `block` counts tiles.
  const BlockWork& block =
      work_.blocks.at(std::min<std::size_t>(content.block, work_.blocks.size() - 1));
  switch (content.what) {
    case What::nothing:
    case What::verdict:
      return 0;
    case What::weights:
      if (content.decoded) return block.decoded_bytes;
      return part_of(block.weight_bytes, content.extent);
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
      return part_of(block.gradient_bytes, content.extent);
    case What::statistics:
      return work_.statistics_bytes;
    case What::losses:
      return work_.losses_bytes;
  }
  return 0;
}

/// What comes to the host for an update, or to be undone there, is only what is trained.
Bytes Interpreter::size_in(const Buffer& buffer, const Content& content) const {
  if (content.what == What::weights && buffer.tier == Tier::nvme && splits_home(content.block)) {
    const BlockWork& work = work_.blocks[content.block];
    const Bytes trained = part_of(work.gradient_bytes, Extent::whole);
    return content.frozen_only ? part_of(work.weight_bytes, Extent::whole) - trained : trained;
  }
  const bool for_update = content.what == What::weights && buffer.tier == Tier::host &&
                          (buffer.kind == Kind::undo ||
                           problem_.placement.blocks[content.block].weights == Tier::device);
  return for_update && home(content.block) == Extent::whole
             ? part_of(work_.blocks[content.block].gradient_bytes, content.extent)
             : size(content);
}

}  // namespace ballast::schedule
