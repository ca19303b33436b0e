#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ballast/comm/communicator.h"
#include "ballast/core/gradient_stats.h"
#include "ballast/model/compute.h"
#include "ballast/step/rank_sizes.h"

namespace ballast::engine {

/// Inputs of the gate's decision, summed over all ranks.
struct GateInputs {
  model::PairResult losses;      ///< over all targets that count; without pairs the loss alone
  double squares = 0.0;          ///< of all packed gradients
  std::uint64_t non_finite = 0;  ///< values of packed gradients
};

/// The sum of what the head has reported of micro-batches: losses, or PairResults if `pairs`.
[[nodiscard]] model::PairResult add_losses(std::span<const double> reported, bool pairs);

/// `sum` divided by `count`.
[[nodiscard]] model::PairResult mean_of(const model::PairResult& sum, double count);

/// Sums over all ranks: losses in rank order, squares by block and in the order of shards. `own`:
/// the statistics of this rank's shard of each block's gradient. Exchanges them if there are
/// several ranks; `ranks` may be null if not. Throws Error(comm).
GateInputs sum_over_ranks(const model::PairResult& losses, const std::vector<GradientStats>& own,
                          const step::RankSizes& sizes, comm::Ranks* ranks);

}  // namespace ballast::engine
