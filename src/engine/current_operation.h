#pragma once

#include <algorithm>
#include <cstdint>

#include "ballast/core/view.h"
#include "ballast/engine/blueprint.h"
#include "ballast/plan/plan.h"
#include "ballast/state/store.h"
#include "ballast/step/rank_sizes.h"

#include "src/engine/lanes.h"

namespace ballast::engine {

/// The operation that a lane performs, with the data of its plan and its buffers.
struct CurrentOperation {
  using Role = plan::Role;
  using Use = plan::Use;
  using BufferId = plan::BufferId;

  Lanes& lanes;
  const plan::Operation& operation;
  StepContext& context;       ///< context of its plan; see Operation::lag
  const StepContext& before;  ///< context of the preceding plan

  [[nodiscard]] const Modules& modules() const { return lanes.modules(); }
  [[nodiscard]] const Blueprint& blueprint() const { return modules().blueprint; }
  [[nodiscard]] const step::Problem& problem() const { return blueprint().problem; }
  [[nodiscard]] const step::BlockSizes& block_sizes() const {
    return problem().blocks[operation.block];
  }
  [[nodiscard]] step::RankSizes sizes() const { return step::RankSizes(problem()); }
  /// Returns its device, with the device's kernels.
  [[nodiscard]] const DeviceModules& own() const { return modules().devices[operation.device]; }
  [[nodiscard]] model::Compute& compute() const { return own().compute; }
  /// Returns the channels of its device between ranks.
  [[nodiscard]] const Lanes::Channels& channels() const { return lanes.channels(operation.device); }
  /// Returns the stream of its lane.
  [[nodiscard]] device::Stream& stream() const { return lanes.queue_of(operation).stream(); }

  [[nodiscard]] bool has(Role role) const { return operation.buffer(role) != plan::kNoBuffer; }
  /// The buffers that a movement reads and writes: the first of each kind.
  [[nodiscard]] const Use& source() const { return first_use(false); }
  [[nodiscard]] const Use& target() const { return first_use(true); }

  /// Returns the first `bytes` of a buffer, or this rank's shard of that size. On the device also
  /// this tensor place's part.
  [[nodiscard]] HostBytes host(const Use& use, Bytes bytes) const {
    const Bytes start = use.shard ? shard_in(use.role) * bytes : 0;
    return modules().store.host(use.buffer, start + bytes).subspan(start);
  }
  [[nodiscard]] HostBytes host(Role role, Bytes bytes) const {
    return host(operation.use(role), bytes);
  }
  /// Like host(), on the device, and from the operation's offset on.
  [[nodiscard]] DeviceBytes device(const Use& use, Bytes bytes) const {
    const std::uint32_t number = use.shard  ? shard_in(use.role)
                                 : use.part ? blueprint().mesh.tensor_place()
                                            : 0;
    const Bytes start = operation.offset + number * bytes;
    return modules().store.device(use.buffer, start + bytes).subview(start, bytes);
  }
  [[nodiscard]] DeviceBytes device(Role role, Bytes bytes) const {
    return device(operation.use(role), bytes);
  }

  /// Index of this rank's shard in the block, and in the weights that the rank keeps.
  [[nodiscard]] std::uint32_t shard_number() const {
    return sizes().shard_of(blueprint().mesh.sharer());
  }
  [[nodiscard]] std::uint32_t shard_at_home() const {
    return sizes().shard_at_home(operation.block, blueprint().mesh.sharer());
  }

 private:
  [[nodiscard]] const Use& first_use(bool writes) const {
    return *std::find_if(operation.uses.begin(), operation.uses.end(),
                         [writes](const Use& use) { return use.writes == writes; });
  }
  [[nodiscard]] std::uint32_t shard_in(Role role) const {
    const bool weights = role == Role::weights || operation.payload == plan::Payload::weights;
    return weights ? shard_at_home() : shard_number();
  }
};

}  // namespace ballast::engine
