#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ballast/core/dtype.h"
#include "ballast/core/places.h"
#include "ballast/core/units.h"
#include "ballast/model/step_program.h"
#include "ballast/step/options.h"
#include "ballast/step/program_index.h"

namespace ballast::step {

/// Consecutive elements of a block whose states are kept in one buffer, moved and updated together
/// (sub_group_size of DeepSpeed's ZeRO-Infinity). Sizes are those of this rank's part.
struct SubGroup {
  Bytes state_bytes = 0;          ///< remainder and moments
  Bytes initial_state_bytes = 0;  ///< first part of state_bytes, which does not start as zeros
  Bytes update_traffic = 0;       ///< memory that the update reads and writes
};

/// Sizes of a block's data outside the passes: weights and packed gradient in full, states and
/// their update per rank.
struct BlockSizes {
  Bytes weight_bytes = 0;  ///< size as stored and moved
  /// Size of the weights after dequantisation. Zero if nothing in the block is quantised; passes
  /// then read the weights as stored.
  Bytes dequantized_bytes = 0;
  Bytes gradient_bytes = 0;          ///< packed
  bool replicated = false;           ///< stage 3 does not split the weights; always for tables
  std::vector<SubGroup> sub_groups;  ///< in ascending order of elements; empty: frozen

  /// Frozen blocks have only weights: no packed gradient, statistics or states.
  [[nodiscard]] bool is_frozen() const { return sub_groups.empty(); }
  [[nodiscard]] bool is_quantized() const { return dequantized_bytes > 0; }
  /// Returns the size of the weights that passes read.
  [[nodiscard]] Bytes whole_weight_bytes() const {
    return is_quantized() ? dequantized_bytes : weight_bytes;
  }
  /// Returns the remainder and moments that this rank keeps.
  [[nodiscard]] Bytes state_bytes() const {
    Bytes sum = 0;
    for (const SubGroup& group : sub_groups) sum += group.state_bytes;
    return sum;
  }
};

/// Input of a schedule: the passes of a model, the sizes of its data, batch and ranks. Here and in
/// plans, ranks are those that share the same tensors: the sharers of core/places.h.
struct Problem {
  std::shared_ptr<const ProgramIndex> index;  ///< the model's step program
  std::vector<BlockSizes> blocks;             ///< in the order of the program
  Bytes statistics_bytes = 0;                 ///< statistics of one block's gradient
  Bytes workspace_bytes = 0;
  std::uint64_t micro_batch_tokens = 0;
  std::uint32_t micro_batches = 1;             ///< per training step, on each rank
  std::uint32_t evaluation_micro_batches = 1;  ///< per evaluation plan, at most micro_batches
  std::uint32_t sharers = 1;                   ///< ranks with other rows: see Mesh
  std::uint32_t tensor = 1;                    ///< ranks that share tiles: see Mesh
  /// Whether each tensor place keeps only its part of the inputs that wait below the device.
  bool partitions_activations = false;
  std::uint32_t devices = 1;  ///< per rank; see deal()
  std::uint32_t stage = 0;    ///< ZeRO stage, 0 to 3; no effect alone
  /// Stage 3: ranks that share one copy of the split weights (hpZ of ZeRO++), a divisor of
  /// `sharers`; 0: all of them.
  std::uint32_t hpz_partition_size = 0;
  /// Bytes per weight (2 or 4) if gathers of split weights move WeightCodes, else 0.
  Bytes qwz_weight_bytes = 0;

  [[nodiscard]] const model::StepProgram& program() const { return index->program(); }
  [[nodiscard]] const std::string& name_of(std::size_t block) const {
    return program().blocks[block].name;
  }
  [[nodiscard]] std::uint64_t tokens_per_step() const {
    return micro_batch_tokens * micro_batches * sharers;
  }
};

/// Returns the sharer that owns a shard if `per_copy` of the `sharers` hold a copy of split weights
/// together; see RankSizes.
constexpr std::uint32_t owner_of_shard(std::uint32_t shard, std::uint32_t sharers,
                                       std::uint32_t per_copy) {
  const std::uint32_t copies = sharers / per_copy;
  return shard % copies * per_copy + shard / copies;
}

/// Sizes of a block's data on one rank under ZeRO's stages (arXiv 1910.02054, section 5): optimizer
/// states are split from stage 1, packed gradients from stage 2, and weights in stage 3, except in
/// blocks that keep them whole (all partly trained ones do). A shard is one of `sharers` equal
/// parts of whole pages; padding follows the block's bytes. Rank r owns shard r (but see below).
/// One rank has no padding. With expert parallelism a rank's expert is its shard of everything:
/// ranks exchange nothing of the block, so its sizes are those of a run with one rank.
///
/// Weights may be split over a group of ranks (hpZ of ZeRO++, arXiv 2306.10209, section 3.2). With
/// n = ranks_per_copy(), ranks [k * n, (k + 1) * n) hold copy k, an equal partition each. Ranks at
/// the same place in their groups hold the same partition, which the shards of these ranks make up:
/// shards are numbered by place first, then by group. For 4 ranks and n = 2:
///
///     rank                    0      1      2      3
///     partition that it has   0 1    2 3    0 1    2 3     resident_weights(): two shards
///     shard that it updates   0      2      1      3       updated_weights(): one shard
class RankSizes {
 public:
  explicit RankSizes(const Problem& problem) : problem_(problem) {}

  [[nodiscard]] bool is_distributed() const { return problem_.sharers > 1; }
  /// Returns whether several ranks share weights and gradients of the block.
  [[nodiscard]] bool is_distributed(std::uint32_t block) const {
    return is_distributed() && !is_per_rank(block);
  }
  [[nodiscard]] bool shards_states(std::uint32_t block) const {
    return is_distributed(block) && problem_.stage >= 1;
  }
  [[nodiscard]] bool shards_gradients(std::uint32_t block) const {
    return is_distributed(block) && problem_.stage >= 2;
  }
  [[nodiscard]] bool shards_weights(std::uint32_t block) const {
    return is_distributed(block) && problem_.stage >= 3 && !problem_.blocks[block].replicated;
  }
  /// Returns whether a rank updates only its shard of the weights that it keeps.
  [[nodiscard]] bool updates_shard(std::uint32_t block) const {
    return shards_states(block) && (!shards_weights(block) || copies() > 1);
  }
  /// Returns whether a rank keeps only a part of the block's states, or weights.
  [[nodiscard]] bool keeps_part_of_states(std::uint32_t block) const {
    return is_distributed() && (problem_.stage >= 1 || is_per_rank(block));
  }
  [[nodiscard]] bool keeps_part_of_weights(std::uint32_t block) const {
    return shards_weights(block) || (is_distributed() && is_per_rank(block));
  }

  /// Number of ranks that share one copy of split weights.
  [[nodiscard]] std::uint32_t ranks_per_copy() const {
    return problem_.stage >= 3 && problem_.hpz_partition_size > 0 ? problem_.hpz_partition_size
                                                                  : problem_.sharers;
  }
  /// Number of copies of split weights, which is also the number of shards in a rank's partition.
  [[nodiscard]] std::uint32_t copies() const { return problem_.sharers / ranks_per_copy(); }
  /// Returns the shard that `rank` owns.
  [[nodiscard]] std::uint32_t shard_of(std::uint32_t rank) const {
    return rank % ranks_per_copy() * copies() + rank / ranks_per_copy();
  }
  [[nodiscard]] std::uint32_t owner_of(std::uint32_t shard) const {
    return owner_of_shard(shard, problem_.sharers, ranks_per_copy());
  }
  /// Returns the index of `rank`'s shard among the shards of the weights that it keeps.
  [[nodiscard]] std::uint32_t shard_at_home(std::uint32_t block, std::uint32_t rank) const {
    return shards_weights(block) ? shard_of(rank) % copies() : shard_of(rank);
  }

  [[nodiscard]] Bytes weight_shard(std::uint32_t block) const {
    return shard(block, problem_.blocks[block].weight_bytes);
  }
  [[nodiscard]] Bytes padded_weights(std::uint32_t block) const {
    return shards(block) * weight_shard(block);
  }
  [[nodiscard]] Bytes gradient_shard(std::uint32_t block) const {
    return shard(block, problem_.blocks[block].gradient_bytes);
  }
  [[nodiscard]] Bytes padded_gradient(std::uint32_t block) const {
    return shards(block) * gradient_shard(block);
  }

  /// Returns the size of the part of split weights that one rank keeps.
  [[nodiscard]] Bytes weight_partition(std::uint32_t block) const {
    return copies() * weight_shard(block);
  }
  /// Returns the size of the weights in their home.
  [[nodiscard]] Bytes resident_weights(std::uint32_t block) const {
    return shards_weights(block) ? weight_partition(block) : padded_weights(block);
  }
  /// Returns whether gathers of split weights move codes.
  [[nodiscard]] bool quantizes_gathers() const { return problem_.qwz_weight_bytes > 0; }
  [[nodiscard]] Bytes partition_codes(std::uint32_t block) const {
    return WeightCodes::bytes_of(weight_partition(block) / problem_.qwz_weight_bytes);
  }
  [[nodiscard]] Bytes gathered_codes(std::uint32_t block) const {
    return ranks_per_copy() * partition_codes(block);
  }
  /// Returns the size of the weights that this rank updates: its shard of the trained ones, which
  /// come first.
  [[nodiscard]] Bytes updated_weights(std::uint32_t block) const {
    return shards_weights(block) ? weight_shard(block) : updated_gradient(block);
  }
  /// Returns the size of the trained weights that a rank keeps: whole, or its partition if
  /// they are split.
  [[nodiscard]] Bytes trained_weights(std::uint32_t block) const {
    return shards_weights(block) ? weight_partition(block) : padded_gradient(block);
  }
  /// Returns the size of the gradient that this rank's update reads.
  [[nodiscard]] Bytes updated_gradient(std::uint32_t block) const {
    return shards_states(block) ? gradient_shard(block) : padded_gradient(block);
  }
  [[nodiscard]] Bytes states(std::uint32_t block, std::uint32_t sub_group) const {
    return problem_.blocks[block].sub_groups[sub_group].state_bytes;
  }

  /// Returns the bytes that this rank receives if `whole` bytes are gathered or scattered over all
  /// ranks.
  [[nodiscard]] Bytes received_from_all(Bytes whole) const {
    return whole - whole / problem_.sharers;
  }
  /// Returns the bytes that it receives if `whole` bytes are gathered from the ranks that share its
  /// copy.
  [[nodiscard]] Bytes received_from_copy(Bytes whole) const {
    return whole - whole / ranks_per_copy();
  }

 private:
  [[nodiscard]] bool is_per_rank(std::uint32_t block) const {
    return problem_.program().blocks[block].per_rank;
  }
  [[nodiscard]] std::uint32_t shards(std::uint32_t block) const {
    return is_distributed(block) ? problem_.sharers : 1;
  }
  [[nodiscard]] Bytes shard(std::uint32_t block, Bytes whole) const {
    return is_distributed(block)
               ? round_up((whole + problem_.sharers - 1) / problem_.sharers, kPage)
               : whole;
  }

  const Problem& problem_;
};

/// Homes of the data of one block.
struct BlockPlacement {
  Tier weights = Tier::device;
  Tier optimizer = Tier::device;
  /// The block's input between forward and backward, see ProgramIndex::places_input(), and the
  /// values of Kept::attention.
  Tier activations = Tier::device;
  /// Layers: what stays from forward to backward; the rest is recomputed. The other blocks that
  /// keep something keep all or nothing. The second half of a layer in tiles: its input stays. The
  /// first block of a head with several tiles: their logits stay, see in_one_pass().
  Kept kept = Kept::nothing;
  /// With gated updates, for states below the device: the block is updated in the backward pass,
  /// assuming that the gate neither clips nor skips the step; see Schedule::rollback.
  bool speculates = false;
  /// The packed gradient until its update: host or nvme. A block with states on the device keeps it
  /// there.
  Tier gradients = Tier::host;
  friend bool operator==(const BlockPlacement&, const BlockPlacement&) = default;
};

struct Placement {
  std::vector<BlockPlacement> blocks;
};

/// Homes of weights and states, by tier.
struct Homes {
  bool device = true;
  bool host = true;
  bool nvme = true;

  [[nodiscard]] constexpr bool has(Tier tier) const {
    return tier == Tier::device ? device : (tier == Tier::host ? host : nvme);
  }
};
inline constexpr Homes kHomesInMemory = {.nvme = false};
constexpr Homes homes_on(Tier tier) {
  return {tier == Tier::device, tier == Tier::host, tier == Tier::nvme};
}

/// Returns whether the head handles all vocabulary tiles in one operation, so that no logit is
/// recomputed: with one tile, or if the head's first block keeps its intermediates and the whole
/// weights of all tiles are on one device.
bool in_one_pass(const Problem& problem, const Placement& placement);

/// Returns whether checkpoints are written while training continues: if some weights or states are
/// in host memory. With weights or states on NVMe this takes one more extent for each of them, so a
/// run that keeps one checkpoint waits instead. `kept`: number of checkpoints that stay.
bool written_in_background(const Placement& placement, std::uint64_t kept);

}  // namespace ballast::step
