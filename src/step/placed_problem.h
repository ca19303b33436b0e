#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "ballast/model/step_program.h"
#include "ballast/step/problem.h"

#include "src/step/devices.h"

namespace ballast::step {

/// The pass of a step in which blocks are updated: gated updates of the preceding step run before
/// the forward pass of their block, eager and speculative ones after its backward pass.
enum class UpdatedIn : std::uint8_t { forward, backward };

struct SwappedStates {
  std::uint32_t block = 0;
  std::uint32_t sub_group = 0;
};

/// Returns whether each tensor place keeps only its part of a value that waits for the backward
/// pass (P_a in ZeRO, arXiv 1910.02054, section 6.1).
inline bool is_partitioned(const Problem& problem, const model::StepValue& value) {
  return problem.partitions_activations && problem.tensor > 1 &&
         value.waits == model::Waits::placed;
}

/// A problem with a placement and options, and the consequences for each block. All three must
/// outlive it.
struct PlacedProblem {
  PlacedProblem(const Problem& problem, const Placement& placement, const Options& options);

  const Problem& problem;
  const Placement& placement;
  const Options& options;
  RankSizes sizes;
  model::HeadForm form;
  std::vector<std::uint8_t> dealt;  ///< see deal(); empty with one device
  // Copies between devices in a training step and in an evaluation.
  Routes training_routes;
  Routes evaluation_routes;

  [[nodiscard]] std::uint32_t devices() const { return problem.devices; }
  /// Returns the device that computes `block` and has its data in device memory.
  [[nodiscard]] std::uint8_t device_of(std::uint32_t block) const {
    return dealt.empty() ? 0 : dealt[block];
  }
  [[nodiscard]] bool has_blocks(std::uint8_t device) const {
    return dealt.empty() || std::find(dealt.begin(), dealt.end(), device) != dealt.end();
  }
  /// Returns whether a training step or an evaluation reads or writes `value` on `device`.
  [[nodiscard]] bool uses(model::ValueId value, std::uint8_t device) const {
    return training_routes.uses(value, device) || evaluation_routes.uses(value, device);
  }
  [[nodiscard]] std::uint32_t blocks() const {
    return static_cast<std::uint32_t>(problem.blocks.size());
  }
  [[nodiscard]] const BlockPlacement& at(std::uint32_t block) const {
    return placement.blocks[block];
  }
  [[nodiscard]] bool trains() const { return options.purpose == Purpose::training; }
  [[nodiscard]] bool is_trained(std::uint32_t block) const {
    return !problem.blocks[block].is_frozen();
  }
  /// Returns whether passes read only selected rows of `block`, see model::StepBlock::selected.
  [[nodiscard]] bool is_table(std::uint32_t block) const {
    return problem.program().blocks[block].selected > 0;
  }
  /// Returns whether passes write the gradient of those rows alone.
  [[nodiscard]] bool is_trained_table(std::uint32_t block) const {
    return problem.program().blocks[block].row_gradients > 0;
  }
  /// Returns whether the packed gradient of `block` is on the device at some time. That of a table
  /// is packed on the host and visits the device only for its sum over the ranks.
  [[nodiscard]] bool packs_on_device(std::uint32_t block) const {
    return is_trained(block) && (!is_trained_table(block) || sizes.is_distributed(block));
  }
  /// Returns whether the weights of `block` are read on the device, where passes need them, or, for
  /// a table, where ranks gather the shards that they have updated.
  [[nodiscard]] bool uses_weights_on_device(std::uint32_t block) const {
    return !is_table(block) || (is_trained(block) && trains() && sizes.updates_shard(block));
  }
  /// Returns whether the states of `block` are below the device.
  [[nodiscard]] bool updates_below(std::uint32_t block) const {
    return is_trained(block) && at(block).optimizer != Tier::device;
  }
  [[nodiscard]] bool speculates(std::uint32_t block) const {
    return is_trained(block) && at(block).speculates;
  }
  [[nodiscard]] bool any_speculates() const {
    for (std::uint32_t b = 0; b < blocks(); ++b) {
      if (speculates(b)) return true;
    }
    return false;
  }
  [[nodiscard]] UpdatedIn update_pass(std::uint32_t block) const {
    const bool gated = options.update == Update::gated && !at(block).speculates;
    return gated ? UpdatedIn::forward : UpdatedIn::backward;
  }
  [[nodiscard]] bool is_updated_in(UpdatedIn pass, std::uint32_t block) const {
    return is_trained(block) && update_pass(block) == pass;
  }

  /// Returns whether the trained weights of `block` have a separate home. The home of the frozen
  /// ones, which follow them, is then on NVMe and never written again. The two sizes are
  /// RankSizes::trained_weights() and the rest of RankSizes::resident_weights().
  [[nodiscard]] bool has_separate_trained_home(std::uint32_t block) const {
    return trains() && at(block).weights == Tier::nvme && is_trained(block) &&
           sizes.trained_weights(block) < sizes.resident_weights(block);
  }
  /// Returns the size of that home; 0 if there is none.
  [[nodiscard]] Bytes trained_home_bytes(std::uint32_t block) const {
    return has_separate_trained_home(block) ? sizes.trained_weights(block) : 0;
  }
  /// Returns the tier of that home: NVMe if the states are there, otherwise host memory, so that a
  /// step writes to NVMe only if states have to be there.
  [[nodiscard]] Tier trained_tier(std::uint32_t block) const {
    return at(block).optimizer == Tier::nvme ? Tier::nvme : Tier::host;
  }

  /// Returns whether the gradient of `block` passes through host staging instead of waiting in host
  /// memory.
  [[nodiscard]] bool swaps_gradient(std::uint32_t block) const {
    return updates_below(block) && at(block).gradients == Tier::nvme;
  }
  /// Returns the bytes on NVMe, in whole pages, for this rank's part of the gradient of `block`.
  [[nodiscard]] Bytes swapped_gradient_bytes(std::uint32_t block) const {
    return round_up(sizes.updated_gradient(block), kPage);
  }
  /// Returns the sub-groups with states on NVMe that are updated in `pass`, in update order. The
  /// i-th of the forward pass, and after these the i-th of the backward pass, use state_staging in
  /// turn.
  [[nodiscard]] std::vector<SwappedStates> swapped_states(UpdatedIn pass) const;
  /// Visits the sub-groups of swapped_states(); `speculates`: false as if no block speculated.
  template <class Visit>
  void for_swapped_states(UpdatedIn pass, Visit visit, bool speculates = true) const {
    for (std::uint32_t i = 0; i < blocks(); ++i) {
      const std::uint32_t b = pass == UpdatedIn::forward ? i : blocks() - 1 - i;
      const bool waits = !speculates && at(b).speculates;
      const UpdatedIn updated = waits ? UpdatedIn::forward : update_pass(b);
      if (at(b).optimizer != Tier::nvme || updated != pass) continue;
      const auto groups = static_cast<std::uint32_t>(problem.blocks[b].sub_groups.size());
      for (std::uint32_t g = 0; g < groups; ++g) visit(SwappedStates{b, g});
    }
  }

  /// Returns whether `value` leaves its buffer on the device between forward and backward pass: for
  /// another tier, or because this rank keeps only its part.
  [[nodiscard]] bool leaves(const model::StepValue& value) const {
    const bool placed = value.waits == model::Waits::placed || keeps_attention(value);
    return trains() && placed &&
           (at(value.owner).activations != Tier::device || is_partitioned(problem, value));
  }
  /// Returns whether the placement decides that `value` is kept from forward to backward pass.
  [[nodiscard]] bool keeps(const model::StepValue& value) const {
    const bool all = value.waits == model::Waits::kept && at(value.owner).kept == Kept::all;
    return trains() && (all || keeps_attention(value));
  }
  /// keeps() for values of model::Waits::kept_attention.
  [[nodiscard]] bool keeps_attention(const model::StepValue& value) const {
    return trains() && value.waits == model::Waits::kept_attention &&
           at(value.owner).kept == Kept::attention;
  }

  /// Returns whether `value` has its own buffer on the device of its owner until the backward pass.
  [[nodiscard]] bool waits_on_device(const model::StepValue& value) const {
    const bool placed = trains() && value.waits == model::Waits::placed;
    return (keeps(value) || placed) && !leaves(value);
  }

  /// Returns whether gradient sums move to the device for the backward pass of each micro-batch.
  [[nodiscard]] bool offloads_sums() const {
    return options.order == Order::micro_batch_major_offload;
  }
  /// Returns whether they have homes in host memory. One micro-batch needs none.
  [[nodiscard]] bool has_sums_on_host() const { return offloads_sums() && micro_batches() > 1; }
  /// Returns whether the packed gradient of `block` waits in the home of its gradient sum, which is
  /// larger and not needed until the update is done.
  [[nodiscard]] bool keeps_gradient_in_sum(std::uint32_t block) const {
    return has_sums_on_host() && updates_below(block) && !swaps_gradient(block) &&
           !is_trained_table(block);
  }

  /// Number of micro-batches of the largest plan, and of those that pass a stop before the next
  /// stop.
  [[nodiscard]] std::uint32_t micro_batches() const {
    return trains() ? problem.micro_batches : problem.evaluation_micro_batches;
  }
  [[nodiscard]] std::uint32_t micro_batches_per_stop() const {
    return micro_batches_per_stop(micro_batches());
  }
  [[nodiscard]] std::uint32_t micro_batches_per_stop(std::uint32_t micro_batches) const {
    return options.order == Order::layer_major ? micro_batches : 1;
  }
};

/// Throws Error(config) for arguments that build() refuses.
void check_arguments(const Problem& problem, const Placement& placement, const Options& options);
/// Refuses plans that an evaluation does not have.
void check_trains(const Options& options);
[[noreturn]] void refuse_arguments(const std::string& message);

/// Blocks of one device with equal sizes and placements.
struct AlikeBlocks {
  std::uint32_t first = 0;
  std::uint32_t count = 1;
};

/// Returns all blocks. Alike ones are together if `merges`: planners sum the buffers of thousands
/// of placements, and a model may have thousands of experts.
std::vector<AlikeBlocks> find_alike(const PlacedProblem& placed, bool merges);

}  // namespace ballast::step
