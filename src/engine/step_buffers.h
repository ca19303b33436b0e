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

#include "src/engine/gate_inputs.h"

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

  /// A layer's intermediates; empty if it keeps none.
  [[nodiscard]] DeviceBytes kept() const {
    if (!has(Role::intermediates)) return {};
    return device(Role::intermediates, work().intermediate_bytes);
  }
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
    return gradient_of_tile(operation_.buffer(Role::output_accumulator), operation_.block);
  }
  [[nodiscard]] DeviceBytes rows() const {
    return device(Role::rows, blueprint_.workload.rows_bytes);
  }
  /// Empty if the operation has none.
  [[nodiscard]] DeviceView<float> row_sums() const {
    if (!has(Role::row_sums)) return {};
    return view_as<float>(device(Role::row_sums, blueprint_.workload.row_sums_bytes));
  }
  [[nodiscard]] DeviceView<double> router_totals() const {
    if (!has(Role::router_totals)) return {};
    return view_as<double>(device(Role::router_totals, blueprint_.workload.router_totals_bytes));
  }
  [[nodiscard]] DeviceBytes input() const { return device(Role::input, activation_bytes()); }
  [[nodiscard]] DeviceBytes flow() const { return device(Role::gradient_flow, activation_bytes()); }
  [[nodiscard]] DeviceView<const std::int32_t> batch_part(std::size_t part) const {
    const Bytes bytes = blueprint_.workload.batch_bytes;
    const auto ids = view_as<const std::int32_t>(ConstDeviceBytes(device(Role::batch, bytes)));
    const std::size_t size = blueprint_.shape.tokens();
    return ids.subview(part * size, size);
  }
  [[nodiscard]] DeviceView<const std::int32_t> tokens() const { return batch_part(0); }
  [[nodiscard]] DeviceView<const std::int32_t> targets() const { return batch_part(1); }
  /// Empty if every sequence is one document.
  [[nodiscard]] DeviceView<const std::int32_t> positions() const {
    if (!blueprint_.workload.packed) return {};
    return batch_part(2);
  }

  /// Of the head, for the operation's micro-batch; empty if the operation has none.
  [[nodiscard]] DeviceView<double> losses() const {
    if (!has(Role::losses)) return {};
    const DeviceBytes all = device(Role::losses, blueprint_.workload.losses_bytes);
    const Bytes bytes = blueprint_.head_losses() * sizeof(double);
    return view_as<double>(all.subview(operation_.micro * bytes, bytes));
  }
  /// By sequence, of the reference.
  [[nodiscard]] DeviceView<double> reference_losses() const {
    return view_as<double>(device(Role::pairs, blueprint_.shape.sequences * sizeof(double)));
  }
  /// Behind them; empty if the operation has none.
  [[nodiscard]] DeviceView<float> row_weights() const {
    if (!has(Role::pairs)) return {};
    const Bytes before = blueprint_.shape.sequences * sizeof(double);
    const DeviceBytes all = device(Role::pairs, blueprint_.workload.pairs_bytes);
    return view_as<float>(all.subview(before, blueprint_.shape.tokens() * sizeof(float)));
  }
  /// What the operation reports of the losses of the rows; empty: nothing.
  [[nodiscard]] model::HeadLosses head_losses(const model::Preference& preference) const {
    if (!has(Role::pairs)) return {losses()};
    if (operation_.reference) return {reference_losses()};
    return {losses(), model::Pairs{preference, reference_losses(), row_weights()}};
  }
  /// The sum over this rank's micro-batches, in host memory.
  [[nodiscard]] model::PairResult own_losses(std::uint32_t micro_batches) const {
    const HostBytes bytes = host(Role::losses, blueprint_.workload.losses_bytes);
    return add_losses(
        {reinterpret_cast<const double*>(bytes.data()), micro_batches * blueprint_.head_losses()},
        blueprint_.pairs);
  }
  /// Of the routers, for the operation's micro-batch; behind those of the head.
  [[nodiscard]] DeviceView<double> router_losses() const {
    if (!has(Role::losses)) return {};
    const DeviceBytes all = device(Role::losses, blueprint_.workload.losses_bytes);
    const std::uint64_t first =
        blueprint_.micro_batches * blueprint_.head_losses() + operation_.micro * kRouterLosses;
    return view_as<double>(all.subview(first * sizeof(double), kRouterLosses * sizeof(double)));
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

  /// All tiles of the vocabulary, for an operation on the whole head.
  [[nodiscard]] std::vector<model::OutputTile> tiles() const {
    std::vector<BufferId> weights;
    std::vector<BufferId> sums;
    for (const Use& use : operation_.uses) {
      if (use.role == Role::output_weights) weights.push_back(use.buffer);
      if (use.role == Role::output_accumulator) sums.push_back(use.buffer);
    }
    const std::size_t count = blueprint_.model.config.vocabulary_tiles;
    const std::size_t own = count - weights.size();  // 1: the head's first block has a tile
    std::vector<model::OutputTile> all;
    for (std::size_t t = 0; t < count; ++t) {
      const std::size_t block = blueprint_.model.tile(t).block;
      all.push_back({t, t < own ? this->weights() : weights_of(weights[t - own], block)});
      if (t < own && has(Role::accumulator)) {
        all.back().gradient = accumulator();
      }
      if (t >= own && !sums.empty()) all.back().gradient = gradient_of_tile(sums[t - own], t);
    }
    return all;
  }
  /// The tile of the operation's block.
  [[nodiscard]] model::OutputTile tile() const {
    const bool tied = blueprint_.workload.tied;
    const std::size_t number = operation_.block - (tied ? 0 : blueprint_.workload.head());
    model::OutputTile one = {number, weights()};
    one.gradient = accumulator();
    if (has(Role::output_accumulator)) one.gradient = output_accumulator();
    return one;
  }
  [[nodiscard]] DeviceBytes weights_of(BufferId buffer, std::size_t block) const {
    return store_.device(buffer, blueprint_.workload.blocks[block].weight_bytes);
  }
  [[nodiscard]] DeviceView<float> gradient_of_tile(BufferId buffer, std::size_t number) const {
    const model::VocabularyTile tile = blueprint_.model.tile(number);
    const Bytes rows = tile.rows * blueprint_.model.config.hidden_size * sizeof(float);
    return view_as<float>(
        store_.device(buffer, blueprint_.workload.tied
                                  ? rows
                                  : blueprint_.workload.blocks[tile.block].accumulator_bytes));
  }

 protected:
  const Blueprint& blueprint_;
  state::Store& store_;
  const schedule::Operation& operation_;
};

}  // namespace ballast::engine
