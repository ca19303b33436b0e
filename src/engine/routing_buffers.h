#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ballast/engine/engine.h"

#include "src/engine/step_buffers.h"
#include "src/model/compute/routing.h"

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
  /// The same for a pass.
  [[nodiscard]] std::span<const std::int32_t> routing_of(BufferId routing,
                                                         std::uint32_t micro) const {
    const HostBytes all = of_micro_batch(blueprint_.workload, store_, routing, micro);
    return {reinterpret_cast<const std::int32_t*>(all.data()), all.size() / sizeof(std::int32_t)};
  }
  [[nodiscard]] model::RoutingCounts counts(BufferId routing, std::uint32_t micro) const {
    return {routing_of(routing, micro), blueprint_.workload.world};
  }
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
  [[nodiscard]] bool holds(const schedule::Condition& condition, std::uint32_t micro_batches,
                           const RowsByExpert& before) const;
};

}  // namespace ballast::engine
