#include "ballast/engine/channel_members.h"

#include <algorithm>
#include <array>

#include "ballast/step/rank_sizes.h"

namespace ballast::engine {

ChannelMembers::ChannelMembers(const Mesh& mesh, std::uint32_t per_copy, bool experts) {
  const std::uint32_t sharers = mesh.sharers();
  const std::uint32_t here = mesh.sharer();
  if (sharers > 1) {
    for (std::uint32_t shard = 0; shard < sharers; ++shard) {
      const std::uint32_t sharer = step::owner_of_shard(shard, sharers, per_copy);
      const std::uint32_t rank = mesh.rank_of(sharer);
      all.push_back(rank);
      if (per_copy == sharers) continue;
      if (sharer / per_copy == here / per_copy) weight_copy.push_back(rank);
      if (sharer % per_copy == here % per_copy) same_share.push_back(rank);
    }
  }
  if (experts) rows = all;
  if (mesh.sequence > 1) heads = mesh.sequence_ranks();
  if (mesh.tensor > 1) tensor = mesh.tensor_ranks();
}

std::uint32_t ChannelMembers::count() const {
  const std::array channels = {&all, &weight_copy, &same_share, &rows, &heads, &tensor};
  return static_cast<std::uint32_t>(std::count_if(
      channels.begin(), channels.end(), [](const auto* members) { return !members->empty(); }));
}

}  // namespace ballast::engine
