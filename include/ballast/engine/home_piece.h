#pragma once

#include <cstdint>
#include <functional>

#include "ballast/core/units.h"
#include "ballast/core/view.h"
#include "ballast/plan/plan.h"

namespace ballast::engine {

/// A piece of this rank's part of a block's weights, or of the states of one of its sub-groups, in
/// host memory.
struct HomePiece {
  std::uint32_t block = 0;
  bool states = false;  ///< states or weights
  std::uint32_t sub_group = 0;
  Bytes offset = 0;  ///< first byte within this rank's part
  HostBytes bytes;
  /// Set by the visitor that fills the piece: `bytes` from this index on are zero, so NVMe need not
  /// be written there.
  Bytes zeros_from = bytes.size();
};

/// Fills or reads pieces. The pieces of a plan come one at a time: by block, a block's weights
/// before its states, the states by sub-group, each in ascending order.
using Visitor = std::function<void(HomePiece&)>;
/// Runs a plan that fills or reads homes and calls the visitor with their pieces. No other plan may
/// run. Throws Error.
using Perform = std::function<void(const plan::Plan& plan, const Visitor& visitor)>;

}  // namespace ballast::engine
