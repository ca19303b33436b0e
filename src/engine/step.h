#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "ballast/cpu_adam/optimizer.h"
#include "ballast/cpu_adam/updater.h"
#include "ballast/device/device.h"
#include "ballast/engine/blueprint.h"
#include "ballast/engine/engine.h"
#include "ballast/model/compute.h"
#include "ballast/state/store.h"

namespace ballast::engine {

/// What one submitted plan carries besides tensors. Written by the caller before the plan is
/// submitted and by the gate; read by operations behind the gate and, after it, by the caller.
struct StepContext {
  bool training = true;
  std::uint32_t micro_batches = 0;
  cpu_adam::Hyper hyper;
  StepResult result;
};

/// Everything the operations of a step work with. Lanes use it at the same time; the plan's edges
/// keep them apart.
struct Machine {
  const config::Config& config;
  const Blueprint& blueprint;
  device::Device& device;
  model::Compute& compute;
  state::Store& store;
  const cpu_adam::Updater& updater;
  std::unique_ptr<device::Stream> compute_stream;
  std::unique_ptr<device::Stream> upload_stream;
  std::unique_ptr<device::Stream> offload_stream;
  /// By step number modulo two: the updates of a step run under the next one.
  std::array<StepContext, 2> contexts;

  StepContext& context(std::uint64_t step) { return contexts[step % contexts.size()]; }
};

/// Performs one operation of a plan and returns when it is finished: the step, told lane by lane.
/// Throws Error.
void perform(Machine& machine, const schedule::Operation& operation, std::uint64_t step);

}  // namespace ballast::engine
