#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "ballast/core/view.h"
#include "ballast/engine/blueprint.h"
#include "ballast/model/compute.h"
#include "ballast/model/gradient_stats.h"
#include "ballast/schedule/plan.h"
#include "ballast/schedule/rank_sizes.h"
#include "ballast/state/store.h"

#include "src/engine/findings.h"

namespace ballast::engine {

/// The buffers that an operation names, cut to the sizes of its block.
class StepBuffers {
 public:
  using Role = schedule::Role;
  using Use = schedule::Use;
  using BufferId = schedule::BufferId;

  StepBuffers(const Blueprint& blueprint, state::Store& store, const schedule::Operation& operation)
      : blueprint_(blueprint), store_(store), operation_(operation) {}

  [[nodiscard]] const schedule::BlockWork& work() const {
    return blueprint_.workload.blocks[operation_.block];
  }
  [[nodiscard]] Bytes activation_bytes() const { return blueprint_.workload.activation_bytes; }
  [[nodiscard]] schedule::RankSizes sizes() const {
    return schedule::RankSizes(blueprint_.workload);
  }
  /// The buffers that a copy or transfer reads and writes.
  [[nodiscard]] const Use& source() const { return use_that(false); }
  [[nodiscard]] const Use& target() const { return use_that(true); }
  [[nodiscard]] const Use& use_that(bool writes) const {
    return *std::find_if(operation_.uses.begin(), operation_.uses.end(),
                         [writes](const Use& use) { return use.writes == writes; });
  }
  /// The first `bytes` of a buffer, or this rank's shard of that size.
  [[nodiscard]] HostBytes host(const Use& use, Bytes bytes) const {
    const Bytes before = use.shard ? shard_in(use.role) * bytes : 0;
    return store_.host(use.buffer, before + bytes).subspan(before);
  }
  [[nodiscard]] HostBytes host(Role role, Bytes bytes) const {
    return host(operation_.use(role), bytes);
  }
  /// The same on the device, plus the operation's offset.
  [[nodiscard]] DeviceBytes device(const Use& use, Bytes bytes) const {
    const Bytes before = operation_.offset + (use.shard ? shard_in(use.role) * bytes : 0);
    return store_.device(use.buffer, before + bytes).subview(before, bytes);
  }
  [[nodiscard]] DeviceBytes device(Role role, Bytes bytes) const {
    return device(operation_.use(role), bytes);
  }
  /// Index of this rank's shard: in the block, and in the weights that the rank keeps.
  [[nodiscard]] std::uint32_t shard_number() const { return sizes().shard_of(blueprint_.rank); }
  [[nodiscard]] std::uint32_t shard_at_home() const {
    return sizes().shard_at_home(operation_.block, blueprint_.rank);
  }
  [[nodiscard]] std::uint32_t shard_in(Role role) const {
    const bool weights = role == Role::weights || role == Role::weights_source;
    return weights ? shard_at_home() : shard_number();
  }
  [[nodiscard]] bool has(Role role) const { return operation_.buffer(role) != schedule::kNoBuffer; }

  [[nodiscard]] DeviceBytes weights() const {
    return device(Role::weights, work().whole_weight_bytes());
  }
  /// Empty if the operation has none: the block is frozen.
  [[nodiscard]] DeviceView<float> accumulator() const {
    if (!has(Role::accumulator)) return {};
    return view_as<float>(device(Role::accumulator, work().accumulator_bytes));
  }
  /// Sums of the output matrix's gradient for the tied tile in the operation's block; empty if the
  /// operation has none.
  [[nodiscard]] DeviceView<float> output_accumulator() const {
    if (!has(Role::output_accumulator)) return {};
    return view_as<float>(
        gradient_of_tile(operation_.buffer(Role::output_accumulator), operation_.block));
  }
  /// The sum over this rank's micro-batches, in host memory.
  [[nodiscard]] model::PairResult own_losses(std::uint32_t micro_batches) const {
    const HostBytes bytes = host(Role::losses, blueprint_.workload.losses_bytes);
    return add_losses(
        {reinterpret_cast<const double*>(bytes.data()), micro_batches * blueprint_.head_losses()},
        blueprint_.pairs);
  }
  /// Place of the losses of the routers, which follow those of the head of all micro-batches.
  [[nodiscard]] std::uint64_t first_router_loss() const {
    return blueprint_.micro_batches * blueprint_.head_losses();
  }
  /// Output for the statistics of the block's gradient; empty if the operation has none.
  [[nodiscard]] DeviceView<model::GradientStats> gradient_statistics() const {
    if (!has(Role::statistics)) return {};
    return view_as<model::GradientStats>(device(Role::statistics, sizeof(model::GradientStats)));
  }
  [[nodiscard]] model::GradientStats statistics(BufferId buffer) const {
    model::GradientStats found;
    std::memcpy(&found, store_.host(buffer, sizeof found).data(), sizeof found);
    return found;
  }

  [[nodiscard]] DeviceBytes weights_of(BufferId buffer, std::size_t block) const {
    return store_.device(buffer, blueprint_.workload.blocks[block].weight_bytes);
  }
  [[nodiscard]] DeviceBytes gradient_of_tile(BufferId buffer, std::size_t number) const {
    const model::VocabularyTile tile = blueprint_.model.tile(number);
    const Bytes rows = tile.rows * blueprint_.model.config.hidden_size * sizeof(float);
    return store_.device(buffer, blueprint_.workload.tied
                                     ? rows
                                     : blueprint_.workload.blocks[tile.block].accumulator_bytes);
  }

 protected:
  const Blueprint& blueprint_;
  state::Store& store_;
  const schedule::Operation& operation_;
};

}  // namespace ballast::engine
