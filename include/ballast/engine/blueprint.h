#pragma once

#include <cstdint>
#include <string>
#include <vector>

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

/// Derives the sizes of all blocks and batches in `blueprint.workload` from the model, the type,
/// the state format, the micro-batches and what the workload already says of ranks (world, stage,
/// weight ranks, coded gathers). `kernels` is the memory that the device's kernels need; blocks of
/// at most `persistence_threshold` parameters keep their weights whole on every rank (stage 3).
/// Placement, schedule and ledger stay as they are.
void size_workload(Blueprint& blueprint, const model::KernelMemory& kernels,
                   std::uint64_t evaluation_micro_batches = 1,
                   std::uint64_t persistence_threshold = 0);

/// Gives every block of a sized `blueprint` its place (one entry per block) and derives ledger and
/// schedule. Throws Error(memory) naming the tier, the need and the largest line when the budgets
/// are too small.
void place(Blueprint& blueprint, schedule::Placement placement);

/// `buffers` as lines by tier and kind.
memory::Ledger make_ledger(const std::vector<schedule::Buffer>& buffers);

/// Where each kind of state lives, for people: "weights: 3 blocks on the device, 2 on the host";
/// that moments are not stored, or weights not gathered, in full when they are not; and among which
/// ranks these are gathered when not among all.
std::vector<std::string> describe_placement(const Blueprint& blueprint);

}  // namespace ballast::engine
