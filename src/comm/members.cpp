#include "src/comm/members.h"

#include <algorithm>
#include <numeric>

#include "ballast/core/error.h"

namespace ballast::comm {

Members::Members(std::span<const std::uint32_t> ranks, std::uint32_t rank, std::uint32_t world)
    : ranks_(ranks.begin(), ranks.end()) {
  if (ranks_.empty()) {
    ranks_.resize(world);
    std::iota(ranks_.begin(), ranks_.end(), 0);
  }
  std::vector<bool> seen(world, false);
  for (const std::uint32_t member : ranks_) {
    expects(member < world && !seen[member], "a channel's members are not distinct ranks");
    seen[member] = true;
  }
  expects(seen[rank], "a rank is no member of the channel that it makes");
  by_rank_.resize(ranks_.size());
  std::iota(by_rank_.begin(), by_rank_.end(), 0);
  std::sort(by_rank_.begin(), by_rank_.end(),
            [&](std::uint32_t a, std::uint32_t b) { return ranks_[a] < ranks_[b]; });
  turns_.resize(ranks_.size());
  for (std::uint32_t i = 0; i < by_rank_.size(); ++i) turns_[by_rank_[i]] = i;
  place_ =
      static_cast<std::uint32_t>(std::find(ranks_.begin(), ranks_.end(), rank) - ranks_.begin());
  all_in_order_ = ranks_.size() == world && std::is_sorted(ranks_.begin(), ranks_.end());
}

}  // namespace ballast::comm
