#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ballast/comm/communicator.h"
#include "ballast/core/dtype.h"
#include "ballast/core/places.h"
#include "ballast/core/units.h"
#include "ballast/cpu_adam/updater.h"
#include "ballast/device/device.h"
#include "ballast/engine/blueprint.h"
#include "ballast/memory/machine.h"
#include "ballast/model/architecture.h"
#include "ballast/model/compute.h"
#include "ballast/state/swap_plan.h"

namespace ballast::config {
struct Config;
}  // namespace ballast::config

namespace ballast::inputs {

/// Division of a batch into micro-batches.
struct BatchRule {
  model::MicroBatchShape shape;  ///< a micro-batch on one rank
  std::uint64_t accumulation = 1;
  bool automatic = false;  ///< the planner chooses the number of sequences and accumulation
  bool pairs = false;      ///< sequences are preference pairs, two each
  bool packed = false;     ///< batches have the position of each token in its document

  /// Micro-batch size as the config counts it: in pairs or sequences.
  [[nodiscard]] std::uint64_t samples() const { return shape.sequences / (pairs ? 2 : 1); }
};

/// The devices of a rank.
struct DeviceRequest {
  std::vector<device::DeviceOptions> options;  ///< at least one: listed or consecutive devices
  std::uint32_t count = 1;   ///< number of devices; 1 while the planner has not chosen
  std::uint32_t listed = 0;  ///< number of devices that the config lists; 0: consecutive ones
  bool open = false;         ///< the planner chooses the number of devices
  int compute_threads = 0;   ///< host device: threads per kernel; 0: all CPUs
  double link_gbps = 0.0;    ///< host device: limits copies to this many GB/s; 0: no limit

  [[nodiscard]] const device::DeviceOptions& first() const { return options.front(); }
};

/// How a device chooses kernels.
struct KernelRequest {
  model::KernelSet set = model::KernelSet::best;
  model::GpuChecks checks = model::GpuChecks::off;
  model::AttentionBackend attention = model::AttentionBackend::best;
  /// Algorithms of matrix products are timed and kept: never, if they can be kept, or always.
  enum class Timing : std::uint8_t { never, if_kept, always } timing = Timing::if_kept;
  std::string names;  ///< these choices as the config names them, for keys of caches
};

/// Settings of ZeRO.
struct ShardingRule {
  std::uint32_t stage = 0;
  std::uint64_t hpz_partition_size = 1;  ///< ranks per copy of the sharded weights; 1: all
  std::uint64_t persistence_threshold = 0;
  std::uint64_t sub_group_size = 0;  ///< maximum number of elements; 0: by the budget
  bool quantized_weights = false;
  bool partition_activations = false;
};

/// A run's config in the terms of the engine and of measurements. translate() makes it once;
/// changes of a run change its members.
struct RunInputs {
  model::Architecture model;  ///< with its adapters and frozen tensors
  /// Returns a model that is trained like the run's: same adapters and patterns of frozen tensors.
  /// Throws Error(config) if they do not suit it.
  std::function<model::Architecture(const model::ModelConfig&, model::RankSplit)> train;
  DType type = DType::bf16;
  engine::StateFormat states;
  BatchRule batch;
  std::uint64_t eval_batches = 0;  ///< micro-batches per evaluation, of all ranks
  ShardingRule sharding;
  step::Options options;
  DeviceRequest devices;
  KernelRequest kernels;
  cpu_adam::UpdaterOptions update;
  std::string update_isa;  ///< the update's instruction set, or "auto"
  std::string state_type;  ///< the type of optimizer states as the config names it
  state::SwapOptions swap;
  bool may_swap = false;   ///< see inputs::may_swap()
  bool must_swap = false;  ///< see inputs::must_swap()
  bool delays = false;     ///< operations are delayed or run one at a time, for debugging
};

/// Translates `config` for the rank of `launch`. Throws Error(config) for a model that cannot be
/// trained as configured.
RunInputs translate(const config::Config& config, const comm::Launch& launch = {});

/// The kernels, and the threads of updates, of a run. For callers that need no model, which
/// translate() builds.
KernelRequest kernel_request(const config::Config& config);
cpu_adam::UpdaterOptions updater_options(const config::Config& config);

/// Returns the blueprint of a run before anything is placed: everything but placement, schedule and
/// ledger.
engine::Blueprint outline(const RunInputs& run, const memory::Budgets& budgets,
                          const model::KernelSizes& kernels, const Mesh& mesh);

/// Returns the largest number of devices that the planner may choose on this machine: the number of
/// listed ones, else that of GPUs for each of `local_world` ranks, or 1 host device.
std::uint32_t available_devices(const DeviceRequest& devices, std::uint32_t local_world = 1);

}  // namespace ballast::inputs
