#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "ballast/core/dtype.h"
#include "ballast/core/places.h"
#include "ballast/core/units.h"
#include "ballast/cpu_adam/optimizer.h"
#include "ballast/memory/ledger.h"
#include "ballast/memory/machine.h"
#include "ballast/model/architecture.h"
#include "ballast/model/compute.h"
#include "ballast/step/plans.h"

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
  model::RouterLossSpan router_losses = model::RouterLossSpan::step;
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
  [[nodiscard]] bool has_positions() const { return packed || shape.slices > 1; }
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

/// One array of a block's state buffer; 0 bytes if it is not kept.
struct StateArray {
  Bytes offset = 0;
  Bytes bytes = 0;
};

/// Layout of a block's weight and state buffers; each array has `elements` elements. In the state
/// buffer every array starts cpu_adam::kArraySkew after a cache line boundary, because blocks are
/// often a power of two long. Gaps are zero; all zeros means zero in every format.
struct StateLayout {
  StateLayout(DType type, const StateFormat& format, Elems elements);

  DType type;  ///< type of weights and gradient
  StateFormat format;
  Elems elements;
  /// The bits that the fp32 master of a weight has beyond the weight:
  /// cpu_adam::Weights::format_of().
  StateArray master;
  StateArray first;  ///< moments, or their codes
  StateArray second;
  StateArray first_exponents;  ///< exponents of codes
  StateArray second_exponents;
  Bytes weight_bytes;
  Bytes state_bytes;     ///< in whole pages
  Bytes update_traffic;  ///< memory that an update reads and writes
};

/// Elements of a block whose states one rank keeps and updates.
struct ShardRange {
  Elems first = 0;
  Elems elements = 0;  ///< fewer than `room`, or none, at the end of the block
  Elems room = 0;      ///< equal on all ranks; zeros follow the elements
};

/// Returns the elements of this rank's shard of weights, or of states: one of `problem.sharers`
/// equal parts or, with expert parallelism, its expert. Starts on whole blocks of
/// cpu_adam::Codes::kBlock, so that 8-bit moments do not depend on the number of shards.
ShardRange even_shard(const Blueprint& blueprint, std::size_t block, bool states);
/// Returns the elements whose states this rank keeps: even_shard() if the stage splits states,
/// otherwise the trained ones of the block; none if it is frozen.
ShardRange rank_shard(const Blueprint& blueprint, std::size_t block);

/// Returns the number of sub-groups of this rank's part of a block, 0 if it is frozen; equal on all
/// ranks.
std::uint32_t sub_groups(const Blueprint& blueprint, std::size_t block);
/// Returns the elements of rank_shard() in a sub-group. They are consecutive; the last sub-group
/// may be smaller.
ShardRange sub_group_range(const Blueprint& blueprint, std::size_t block, std::uint32_t sub_group);
/// Returns the layout of one sub-group.
StateLayout state_layout(const Blueprint& blueprint, std::size_t block, std::uint32_t sub_group);

/// Returns a sub-group of the shard that this rank updates. `weights` and `gradient` are those of
/// the whole shard and have the same type; `states` are those of the sub-group. Null for arrays
/// that are elsewhere.
cpu_adam::Shard make_shard(const Blueprint& blueprint, std::size_t block, std::uint32_t sub_group,
                           std::byte* weights, std::byte* states, const std::byte* gradient);

/// The ranks of each channel that a rank has on each of its devices, by their place in the channel.
/// A channel that the run does not use has none.
struct ChannelMembers {
  /// `per_copy`: number of sharers that hold one copy of split weights. `experts`: whether the
  /// sharers also share experts.
  ChannelMembers(const Mesh& mesh, std::uint32_t per_copy, bool experts);

  /// Number of channels.
  [[nodiscard]] std::uint32_t count() const;

  std::vector<std::uint32_t> all;  ///< the sharers in the order of their shards
  /// With several copies of split weights: the ranks of this rank's copy, and the ranks with the
  /// same share of each copy.
  std::vector<std::uint32_t> weight_copy;
  std::vector<std::uint32_t> same_share;
  std::vector<std::uint32_t> rows;    ///< ranks that share the experts of a layer
  std::vector<std::uint32_t> heads;   ///< ranks that share sequences
  std::vector<std::uint32_t> tensor;  ///< ranks that share the tiles of each matrix
};

}  // namespace ballast::engine
