#pragma once

#include <string>
#include <vector>

#include "ballast/config/config.h"
#include "ballast/core/dtype.h"
#include "ballast/cpu_adam/optimizer.h"
#include "ballast/cpu_adam/shard.h"
#include "ballast/memory/budget.h"
#include "ballast/memory/ledger.h"
#include "ballast/model/architecture.h"
#include "ballast/model/compute.h"
#include "ballast/schedule/plan.h"

namespace ballast::engine {

/// What the optimizer keeps of each parameter.
struct StateFormat {
  cpu_adam::Optimizer optimizer = cpu_adam::Optimizer::adamw;
  cpu_adam::Moments::Format moments = cpu_adam::Moments::Format::f32;
};

/// Everything that is decided before a byte is allocated.
struct Blueprint {
  model::Architecture model;
  DType type = DType::bf16;  ///< of weights, activations and packed gradients
  StateFormat states;
  model::MicroBatchShape shape;
  std::uint64_t micro_batches = 1;
  std::uint32_t rank = 0;  ///< of workload.world; everything else is the same on all of them
  memory::Budgets budgets;
  schedule::Workload workload;
  schedule::Placement placement;
  schedule::Options options;
  schedule::Schedule schedule;
  memory::Ledger ledger;

  /// Tokens of one training step on this rank; workload.tokens_per_step() has those of all.
  [[nodiscard]] std::uint64_t tokens_per_step() const { return micro_batches * shape.tokens(); }
  /// Of the matrix products that this rank computes in a training step, those computed again too.
  [[nodiscard]] double flops_per_step() const { return schedule.steady.flops(); }
};

/// `wanted` with what is 0 in it filled in: from `available` bytes of this machine's memory, and
/// from that of the device that `config` names, where it has its own (memory::resolve_budgets).
memory::Budgets resolve_budgets(const config::Config& config, memory::Budgets wanted,
                                Bytes available, std::uint32_t local_rank = 0);

/// Free memory of the device that `config` names for the rank with that number on its machine; 0
/// where the device takes what it needs from the machine's.
Bytes own_device_memory(const config::Config& config, std::uint32_t local_rank);

/// Chooses the placement of `model`: what the config names is kept, every "auto" is filled from the
/// fastest tier that still fits, weights before optimizer states, blocks in forward order, and then
/// layers keep their intermediates while there is room. Builds schedule and ledger. Throws
/// Error(memory) naming the line that does not fit.
Blueprint draw_blueprint(const config::Config& config, const model::Architecture& model,
                         const memory::Budgets& budgets, const model::KernelMemory& kernels,
                         std::uint32_t world = 1, std::uint32_t rank = 0);

/// `buffers` as lines by tier and kind.
memory::Ledger make_ledger(const std::vector<schedule::Buffer>& buffers);

/// Where each kind of state lives, for people: "weights: 3 blocks on the device, 2 on the host";
/// that moments are not stored, or weights not gathered, in full when they are not; and among which
/// ranks these are gathered when not among all.
std::vector<std::string> describe_placement(const Blueprint& blueprint);

}  // namespace ballast::engine
