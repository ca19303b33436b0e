#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "ballast/core/dtype.h"
#include "ballast/core/mesh.h"
#include "ballast/cpu_adam/optimizer.h"
#include "ballast/cpu_adam/shard.h"
#include "ballast/memory/budget.h"
#include "ballast/memory/ledger.h"
#include "ballast/model/architecture.h"
#include "ballast/model/compute.h"
#include "ballast/step/build.h"

namespace ballast::engine {

/// The optimizer and the format of its states.
struct StateFormat {
  cpu_adam::Optimizer optimizer = cpu_adam::Optimizer::adamw;
  cpu_adam::Moments::Format moments = cpu_adam::Moments::Format::f32;
};

/// Sub-groups have a multiple of this many elements: whole pages of weights, whole blocks of 8-bit
/// moments.
inline constexpr Elems kSubGroupUnit = 2048;

/// All decisions that precede the allocation of memory.
struct Blueprint {
  model::Architecture model;  ///< with the tiles of all tensor places
  /// model::at_tensor_place() of this rank if ranks share tiles, otherwise null; set by
  /// size_problem().
  std::shared_ptr<const model::Architecture> tiles;
  DType type = DType::bf16;  ///< type of weights, activations and packed gradients
  StateFormat states;
  /// Maximum elements whose states are moved and updated together; see size_problem().
  Elems sub_group_size = std::numeric_limits<Elems>::max();
  model::MicroBatchShape shape;
  /// Sequences 2 i and 2 i + 1 of a micro-batch are a preference pair, with the loss of
  /// EngineOptions::preference. Everything but the adapters is frozen.
  bool pairs = false;
  bool packed = false;  ///< several documents per sequence
  /// Index of the first element of each of model::whole_blocks() among the elements of all, each
  /// block aligned to cpu_adam::Codes::kBlock. By BlockSpec::number.
  std::vector<Elems> first_elements;
  /// Elements without weight decay, over all whole blocks, ascending.
  std::vector<ElementRange> undecayed;
  std::uint64_t micro_batches = 1;
  Mesh mesh;  ///< only its rank and `tiles` differ by rank
  memory::Budgets budgets;
  step::Problem problem;
  step::Placement placement;
  step::Options options;
  plan::Schedule schedule;
  memory::Ledger ledger;

  /// The model with the tiles of this rank's tensor place.
  [[nodiscard]] const model::Architecture& own() const { return tiles ? *tiles : model; }
  /// Whether a batch has the positions of its tokens, which layers read.
  [[nodiscard]] bool has_positions() const { return packed || shape.parts > 1; }
  /// Tokens of one training step on this rank; problem.tokens_per_step() counts all ranks.
  [[nodiscard]] std::uint64_t tokens_per_step() const { return micro_batches * shape.tokens(); }
  /// FLOPs of this rank's matrix products in a training step, including recomputation.
  [[nodiscard]] double flops_per_step() const { return schedule.steady.flops(); }
};

/// Derives the sizes of all blocks and batches in `blueprint.problem` from the model, the type, the
/// state format, the micro-batches and the problem's settings: ranks (sharers, stage, hpZ, qwZ) and
/// `packed`. `kernels`: memory that the device's kernels need. Blocks of at most
/// `persistence_threshold` parameters keep their weights whole on every rank (stage 3). States are
/// cut into sub-groups of at most `sub_group_size` elements, rounded down to a multiple of
/// kSubGroupUnit that is not 0. Partly trained blocks keep their weights whole, too.
void size_problem(Blueprint& blueprint, const model::KernelSizes& kernels,
                  std::uint64_t evaluation_micro_batches = 1,
                  std::uint64_t persistence_threshold = 0);

/// Sets the placement of a sized `blueprint` (one entry per block) and derives ledger and schedule.
/// Throws Error(memory) with the tier, the need and the largest line if a budget is too small.
void place(Blueprint& blueprint, step::Placement placement);

/// Returns `buffers` as lines by tier and kind.
memory::Ledger make_ledger(const std::vector<plan::Buffer>& buffers);

/// Returns one line per kind of state, such as "weights  3 blocks on device, 2 blocks on host".
/// Mentions moments that are not fp32, and gathers of weights in 8 bits or among only some ranks.
std::vector<std::string> describe_placement(const Blueprint& blueprint);

}  // namespace ballast::engine
