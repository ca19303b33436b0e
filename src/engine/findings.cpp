#include "src/engine/findings.h"

#include <cstddef>
#include <span>

namespace ballast::engine {

Findings sum_findings(const std::vector<model::GradientStats>& own,
                      const schedule::RankSizes& sizes, comm::Ranks* ranks) {
  std::vector<model::GradientStats> all = own;
  const std::uint32_t world = ranks == nullptr ? 1 : ranks->world();
  if (world > 1) {
    all.resize(world * own.size());
    ranks->all_gather(std::as_bytes(std::span(own)), std::as_writable_bytes(std::span(all)));
  }
  Findings sums;
  for (std::size_t i = 0; i < own.size(); ++i) {
    for (std::uint32_t p = 0; p < world; ++p) {
      const std::size_t rank = i == 0 ? p : sizes.owner_of(p);
      const model::GradientStats& one = all[rank * own.size() + i];
      (i == 0 ? sums.loss : sums.squares) += one.sum_of_squares;
      sums.non_finite += one.non_finite;
    }
  }
  return sums;
}

}  // namespace ballast::engine
