#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

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
#include "ballast/step/options.h"

namespace ballast::engine {

/// Division of a batch into micro-batches.
struct BatchRule {
  model::MicroBatchShape shape;  ///< a micro-batch on one rank
  std::uint64_t accumulation = 1;
  std::uint64_t train_batch = 1;  ///< samples per step, of all ranks
  bool automatic = false;         ///< a planner chooses the number of sequences and accumulation
  bool pairs = false;             ///< samples are preference pairs, two sequences each
  bool packed = false;            ///< batches have the position of each token in its document

  /// Number of samples per micro-batch: of pairs or sequences.
  [[nodiscard]] std::uint64_t samples() const { return shape.sequences / (pairs ? 2 : 1); }
  /// Returns the rule with micro-batches of `size` samples. `data_ranks`: number of ranks with
  /// other samples, Mesh::data.
  [[nodiscard]] BatchRule with_samples(std::uint64_t size, std::uint32_t data_ranks) const;
};

/// The devices of a rank.
struct DeviceRequest {
  std::vector<device::DeviceOptions> options;  ///< at least one: listed or consecutive devices
  std::uint32_t count = 1;                     ///< number of devices; 1 while no planner has chosen
  std::uint32_t listed = 0;  ///< number of devices that the user lists; 0: consecutive ones
  bool open = false;         ///< a planner chooses the number of devices
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
  std::string names;  ///< these choices as the user names them, for keys of caches
};

/// Settings of ZeRO.
struct ShardingRule {
  std::uint32_t stage = 0;
  std::uint64_t hpz_partition_size = 1;  ///< ranks per copy of the sharded weights; 1: all
  std::uint64_t persistence_threshold = 0;
  std::uint64_t sub_group_size = 0;  ///< maximum number of elements; 0: by the budget
  bool quantized_weights = false;
  bool partition_activations = false;

  /// Returns how many of the `sharers` of a rank share one copy of the weights; 0: all. Throws
  /// Error(config) if that does not divide them.
  [[nodiscard]] std::uint32_t copy_sharers(std::uint32_t sharers) const;
};

/// Choices of a planner that the user has made. Empty members are open.
struct Constraints {
  step::PlacementConstraint placement;     ///< for all blocks
  std::vector<step::PlacementRule> rules;  ///< for some blocks; later ones win
  std::optional<step::Order> order;
  step::BufferCounts buffers = step::kOpenBuffers;
  std::optional<bool> expert_prefetch;
  std::optional<std::uint64_t> speculative_updates;  ///< number of speculating blocks
  bool open_expert_ranks = false;  ///< a planner chooses RankSplit::experts of the model

  /// Returns whether anything is on NVMe.
  [[nodiscard]] bool must_swap() const;
  /// Returns whether anything is on NVMe or a planner may place it there. Open activations and
  /// gradients alone do not count, because they go there only if nothing else fits.
  [[nodiscard]] bool may_swap() const;
  friend bool operator==(const Constraints&, const Constraints&) = default;
};

/// A run in the terms of planner, engine and measurements. Whoever varies a run changes members.
struct RunInputs {
  model::Architecture model;    ///< with its adapters and frozen tensors
  model::TrainedParts trained;  ///< for trained_like()
  model::OpenTiles open_tiles;
  DType type = DType::bf16;
  engine::StateFormat states;
  BatchRule batch;
  model::RouterLossSpan router_losses = model::RouterLossSpan::step;
  std::uint64_t eval_batches = 0;  ///< micro-batches per evaluation, of all ranks
  ShardingRule sharding;
  memory::Budgets budgets;  ///< that the user sets; 0: automatic
  Constraints constraints;
  step::Options options;  ///< `constraints` replace what they set
  DeviceRequest devices;
  KernelRequest kernels;
  cpu_adam::UpdaterOptions update;
  std::string update_isa;  ///< the update's instruction set, or "auto"
  std::string state_type;  ///< the type of optimizer states as the user names it
  state::SwapOptions swap;
  bool delays = false;  ///< operations are delayed or run one at a time, for debugging

  /// Returns whether router losses are those of the whole step, for which several micro-batches
  /// need layer-major order.
  [[nodiscard]] bool has_losses_of_step() const;
  /// Returns the model of `config` with the run's adapters and patterns of frozen tensors. Throws
  /// Error(config) if they do not suit it.
  [[nodiscard]] model::Architecture trained_like(const model::ModelConfig& config,
                                                 const model::RankSplit& split) const;
};

/// Returns the blueprint of a run before anything is placed: everything but placement, schedule and
/// ledger. `batch` replaces that of the run.
Blueprint outline(const RunInputs& run, const BatchRule& batch, const memory::Budgets& budgets,
                  const model::KernelSizes& kernels, const Mesh& mesh);
inline Blueprint outline(const RunInputs& run, const memory::Budgets& budgets,
                         const model::KernelSizes& kernels, const Mesh& mesh) {
  return outline(run, run.batch, budgets, kernels, mesh);
}

/// Returns the largest number of devices that a planner may choose on this machine: the number of
/// listed ones, else that of GPUs for each of `local_world` ranks, or 1 host device.
std::uint32_t available_devices(const DeviceRequest& devices, std::uint32_t local_world = 1);

}  // namespace ballast::engine
