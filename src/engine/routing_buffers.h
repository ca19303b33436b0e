#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ballast/engine/step_types.h"

#include "src/engine/step_buffers.h"

namespace ballast::engine {

/// StepResult::expert_rows.
using RowsByExpert = std::vector<std::vector<std::uint64_t>>;

/// What an operation finds in host memory of the choices of the routers.
class RoutingBuffers : public StepBuffers {
 public:
  using StepBuffers::StepBuffers;

  /// The bytes of the routings of a micro-batch, of all ranks.
  [[nodiscard]] static Bytes of_micro_batch(const schedule::Workload& workload) {
    return workload.world * workload.routing_bytes;
  }
  /// Where they are in `routing`, a buffer in host memory.
  [[nodiscard]] static HostBytes of_micro_batch(const schedule::Workload& workload,
                                                state::Store& store, BufferId routing,
                                                std::uint32_t micro) {
    const Bytes bytes = of_micro_batch(workload);
    return store.host(routing, (micro + 1) * bytes).subspan(micro * bytes);
  }
  /// Where the rows of each expert of a layer begin among the choices of a micro-batch: what the
  /// router of rank owner_of(`shard`) has written; one more than there are experts.
  [[nodiscard]] std::span<const std::int32_t> expert_starts(BufferId routing, std::uint32_t micro,
                                                            std::uint32_t shard) const {
    const Bytes bytes = blueprint_.workload.routing_bytes;
    const HostBytes all = of_micro_batch(blueprint_.workload, store_, routing, micro);
    return {reinterpret_cast<const std::int32_t*>(all.data() + shard * bytes),
            bytes / sizeof(std::int32_t)};
  }
  /// This rank's rows for the expert in the operation's block.
  [[nodiscard]] model::ExpertChoices expert_choices(std::uint32_t micro) const {
    return choices_of(micro, shard_number(), own_expert());
  }
  /// Those of all ranks for the experts in the operation's block, one for each rank.
  [[nodiscard]] model::SharedChoices shared_choices(std::uint32_t micro) const;
  /// Whether the operation has something to do in a plan of so many micro-batches: its conditions.
  /// `before`: of the plan submitted before, or empty.
  [[nodiscard]] bool has_work(std::uint32_t micro_batches, const RowsByExpert& before) const;
  /// For the gate, which reads the routings of all layers: adds what the routers have chosen, and
  /// their losses.
  void note_routing(std::uint32_t micro_batches, StepResult& result) const;

 private:
  [[nodiscard]] const model::BlockSpec& block() const {
    return blueprint_.model.blocks[operation_.block];
  }
  /// The expert of the operation's block that this rank has.
  [[nodiscard]] std::uint64_t own_expert() const {
    return block().expert + (block().experts > 1 ? shard_number() : 0);
  }
  [[nodiscard]] model::ExpertChoices choices_of(std::uint32_t micro, std::uint32_t shard,
                                                std::uint64_t expert) const {
    const auto starts = expert_starts(operation_.buffer(Role::routing), micro, shard);
    const auto first = static_cast<std::size_t>(starts[expert]);
    return {first, static_cast<std::size_t>(starts[expert + 1]) - first};
  }
  [[nodiscard]] bool holds(const schedule::Condition& condition, std::uint32_t micro_batches,
                           const RowsByExpert& before) const;
};

}  // namespace ballast::engine
