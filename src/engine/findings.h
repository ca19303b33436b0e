#pragma once

#include <cstdint>
#include <vector>

#include "ballast/comm/communicator.h"
#include "ballast/model/gradient_stats.h"
#include "ballast/schedule/rank_sizes.h"

namespace ballast::engine {

/// Inputs of the gate's decision.
struct Findings {
  double loss = 0.0;     ///< sum over the targets of all ranks
  double squares = 0.0;  ///< of all packed gradients
  std::uint64_t non_finite = 0;
};

/// Sums over all ranks: losses in rank order, squares by block and in the order of shards. `own`:
/// this rank's loss, then the statistics of its shard of each block's gradient. Exchanges them if
/// there are several ranks; `ranks` may be null if not. Throws Error(comm).
Findings sum_findings(const std::vector<model::GradientStats>& own,
                      const schedule::RankSizes& sizes, comm::Ranks* ranks);

}  // namespace ballast::engine
