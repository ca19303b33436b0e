#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "ballast/comm/communicator.h"
#include "ballast/cpu_adam/optimizer.h"
#include "ballast/cpu_adam/updater.h"
#include "ballast/device/device.h"
#include "ballast/engine/blueprint.h"
#include "ballast/engine/engine.h"
#include "ballast/model/compute.h"
#include "ballast/state/store.h"
#include "ballast/update/device_update.h"

#include "src/engine/queued_lane.h"

namespace ballast::engine {

/// What one submitted plan carries besides tensors. Written by the caller before the plan is
/// submitted and by the gate; read by operations behind the gate and, after it, by the caller.
struct StepContext {
  std::uint32_t micro_batches = 0;
  cpu_adam::Hyper hyper;
  StepResult result;
};

/// Everything the operations of a step work with. Lanes use it at the same time; the plan's edges
/// keep them apart.
struct Machine {
  const EngineOptions& options;
  const Blueprint& blueprint;
  device::Device& device;
  model::Compute& compute;
  state::Store& store;
  const cpu_adam::Updater& updater;
  update::DeviceUpdate& device_update;
  QueuedLane compute_lane;
  QueuedLane upload_lane;
  QueuedLane offload_lane;
  std::unique_ptr<device::Stream> update_stream;
  comm::Ranks* ranks = nullptr;  ///< nullptr, and nothing of the following, for one rank alone
  std::unique_ptr<comm::Communicator> gathering;  ///< all ranks, by number of their parts
  std::unique_ptr<comm::Communicator> reducing;   ///< the same
  /// Those that have a copy of split weights together, and those with the same share of it; none
  /// when that is `gathering` and nobody.
  std::unique_ptr<comm::Communicator> gathering_in_group;
  std::unique_ptr<comm::Communicator> gathering_share;
  std::unique_ptr<device::Stream> gather_stream;
  std::unique_ptr<device::Stream> reduce_stream;
  /// By number of the run. A gated update reads that of the run before its own, which is under way
  /// until the next one but two is submitted.
  std::array<StepContext, 4> contexts;

  StepContext& context(std::uint64_t run) { return contexts[run % contexts.size()]; }
};

/// Performs one operation of a plan, or enqueues it where its lane is queued: the step, told lane
/// by lane. Throws Error.
void start(Machine& machine, const schedule::Operation& operation, std::uint64_t run);

/// Returns when the first operation of a queued lane is over that was started and not finished.
/// `operation`: which one that is. Throws Error.
void finish(Machine& machine, const schedule::Operation& operation);

}  // namespace ballast::engine
