#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ballast/engine/engine.h"

#include "src/engine/step_buffers.h"

namespace ballast::engine {

/// What an operation finds in host memory of the choices of the routers.
class RoutingBuffers : public StepBuffers {
 public:
  using StepBuffers::StepBuffers;

  /// Where the rows of each expert of a layer begin among the choices of a micro-batch: what the
  /// router has written to host memory; one more than there are experts.
  [[nodiscard]] std::span<const std::int32_t> expert_starts(BufferId routing,
                                                            std::uint32_t micro) const {
    const Bytes bytes = blueprint_.workload.routing_bytes;
    const HostBytes all = store_.host(routing, (micro + 1) * bytes);
    return {reinterpret_cast<const std::int32_t*>(all.data() + micro * bytes),
            bytes / sizeof(std::int32_t)};
  }
  /// The rows of the expert in the operation's block.
  [[nodiscard]] model::ExpertChoices expert_choices(std::uint32_t micro) const {
    const auto starts = expert_starts(operation_.buffer(Role::routing), micro);
    const std::size_t expert = blueprint_.model.blocks[operation_.block].expert;
    const auto first = static_cast<std::size_t>(starts[expert]);
    return {first, static_cast<std::size_t>(starts[expert + 1]) - first};
  }
  /// Whether the condition of an operation on an expert holds, in a step of so many micro-batches.
  /// `before`: StepResult::expert_rows of the step that the operation belongs to, if that has
  /// ended.
  [[nodiscard]] bool has_work(std::uint32_t micro_batches,
                              const std::vector<std::uint64_t>& before) const;
  /// For the gate, which reads the routings of all layers: adds what the routers have chosen, and
  /// their losses.
  void note_routing(std::uint32_t micro_batches, StepResult& result) const;
};

}  // namespace ballast::engine
