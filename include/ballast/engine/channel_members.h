#pragma once

#include <cstdint>
#include <vector>

#include "ballast/core/mesh.h"

namespace ballast::engine {

/// The ranks of each channel that a rank has on each of its devices, by their place in the channel.
/// A channel that the run does not use has none.
struct ChannelMembers {
  /// `per_copy`: number of sharers that hold one copy of split weights. `experts`: whether the
  /// sharers also share experts.
  ChannelMembers(const Mesh& mesh, std::uint32_t per_copy, bool experts);

  /// Number of channels.
  [[nodiscard]] std::uint32_t count() const;

  std::vector<std::uint32_t> all;  ///< the sharers in the order of their shards
  /// With several copies of split weights: the ranks of this rank's copy, and the ranks with the
  /// same share of each copy.
  std::vector<std::uint32_t> weight_copy;
  std::vector<std::uint32_t> same_share;
  std::vector<std::uint32_t> rows;    ///< ranks that share the experts of a layer
  std::vector<std::uint32_t> heads;   ///< ranks that share sequences
  std::vector<std::uint32_t> tensor;  ///< ranks that share the tiles of each matrix
};

}  // namespace ballast::engine
