#pragma once

#include <cstdint>
#include <vector>

#include "ballast/step/placement.h"

#include "src/step/plan_types.h"

namespace ballast::step {

// What follows from a placement for the buffers and operations of its blocks.

/// Whether the trained weights of `block` have a home of their own beside that of the frozen ones
/// behind them, which is on NVMe and never written again. The two are RankSizes::updated_by_all()
/// and the rest of RankSizes::weights().
bool splits_home(const Problem& problem, const Placement& placement, const Options& options,
                 std::uint32_t block);

/// Where that home of trained weights is: on NVMe if their states are, else in host memory, so that
/// a step writes to NVMe only if states have to be there.
Tier trained_tier(const BlockPlacement& place);

/// Whether the gradient of `block` passes through host staging instead of waiting in host memory.
bool swaps_gradient(const Problem& problem, const Placement& placement, std::uint32_t block);

/// The pass of a step in which blocks are updated: gated updates of the step before precede the
/// forward pass of their block, eager and speculative ones follow its backward pass.
enum class UpdatedIn : std::uint8_t { forward, backward };

UpdatedIn update_pass(const Placement& placement, const Options& options, std::uint32_t block);

struct SwappedStates {
  std::uint32_t block = 0;
  std::uint32_t sub_group = 0;
};

/// The sub-groups whose states live on NVMe and that are updated in `pass`, in update order. The
/// i-th of the forward pass, and after these the i-th of the backward pass, use state_staging in
/// turn.
std::vector<SwappedStates> swapped_states(const Problem& problem, const Placement& placement,
                                          const Options& options, UpdatedIn pass);

/// Bytes on NVMe, in whole pages, of what this rank keeps of the gradient of `block`.
Bytes swapped_gradient_bytes(const Problem& problem, std::uint32_t block);

}  // namespace ballast::step
