#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ballast/core/units.h"
#include "ballast/step/problem.h"

namespace ballast::step {

/// Sizes of one block: weights and gradients in full, states and their update per rank.
struct BlockWork {
  std::string name;
  Bytes weight_bytes = 0;  ///< as they are kept and moved
  /// Of a layer whose weights are codes in part: all in the training type, as they are decoded for
  /// its passes. 0: passes read weights as they are kept.
  Bytes decoded_bytes = 0;
  Bytes accumulator_bytes = 0;  ///< fp32
  Bytes gradient_bytes = 0;     ///< packed
  double forward_flops = 0.0;   ///< per micro-batch
  /// Part of forward_flops that the backward pass repeats when intermediates are not kept.
  double recomputed_flops = 0.0;
  /// Part of forward_flops by frozen matrices, whose gradients the backward pass leaves out.
  double frozen_flops = 0.0;
  Bytes norm_traffic = 0;  ///< weights that each pass reads for the norms of adapters
  /// It is a tile of the same embedding, head or half of a layer as the block before it: all read
  /// what the first of them reads.
  bool continues = false;
  /// Its input is the stream between the halves of a layer that is cut: kept on the device, or
  /// computed again by the half before it.
  bool mid_layer = false;
  /// The norm and the router before experts, which are the blocks that continue it.
  bool routes = false;
  /// An expert: it computes the rows that the router sends to it.
  bool is_expert = false;
  /// Of the tokens, those that an expert computes if all have as many.
  double token_share = 1.0;
  /// Each rank has an expert of its own in the block, which stays there; the rows of all ranks come
  /// to it. Sizes and FLOPs are those of this rank.
  bool expert_parallel = false;
  bool keeps_whole = false;      ///< stage 3 does not split its weights; of all with codes
  Bytes intermediate_bytes = 0;  ///< per micro-batch (a head's: of all), if the block keeps them
  Bytes cleared_bytes = 0;       ///< of accumulator_bytes, zeroed before the first micro-batch
  std::vector<SubGroup> sub_groups = {};  ///< in ascending order of elements; none: it is frozen

  /// It has weights alone: no accumulator, packed gradient, statistics or states.
  [[nodiscard]] bool is_frozen() const { return sub_groups.empty(); }
  [[nodiscard]] bool is_coded() const { return decoded_bytes > 0; }
  /// What its passes read.
  [[nodiscard]] Bytes whole_weight_bytes() const {
    return is_coded() ? decoded_bytes : weight_bytes;
  }
  /// Of the backward pass, without what it recomputes.
  [[nodiscard]] double backward_flops() const { return 2.0 * forward_flops - frozen_flops; }
  /// Remainder and moments that this rank keeps.
  [[nodiscard]] Bytes state_bytes() const {
    Bytes sum = 0;
    for (const SubGroup& group : sub_groups) sum += group.state_bytes;
    return sum;
  }
};

/// Sizes of a model and its batch, with flags from which with_program() makes a step program.
struct Workload {
  std::vector<BlockWork> blocks;  ///< embedding, layers, head
  bool tied = false;              ///< the head also reads the embedding's weights
  /// Blocks of the embedding and, unless it is tied, of the head, which each have some rows of the
  /// vocabulary. A tied head is one block.
  std::uint32_t vocabulary_tiles = 1;
  Bytes tied_accumulator_bytes = 0;  ///< of one tile; 0: not tied, or frozen
  /// The backward pass ends with this block, which begins the embedding, a layer or the head. Those
  /// before it are frozen.
  std::uint32_t first_differentiated = 0;
  Bytes rows_bytes = 0;           ///< see Role; per micro-batch, 0 without tiles
  Bytes row_sums_bytes = 0;       ///< likewise
  Bytes routing_bytes = 0;        ///< see Role; per micro-batch, 0 without experts
  Bytes router_totals_bytes = 0;  ///< likewise
  Bytes activation_bytes = 0;     ///< of one micro-batch between two blocks
  Bytes batch_bytes = 0;          ///< tokens, targets and, if packed, positions of one micro-batch
  bool packed = false;            ///< layers read the positions of the tokens
  Bytes losses_bytes = 0;         ///< losses of all micro-batches, with those of routers
  /// Sequences are pairs, and their loss compares them with a reference: the same weights without
  /// adapters, by passes of their own from the first differentiated block on. See Role; per
  /// micro-batch, 0: no reference.
  Bytes pairs_bytes = 0;
  Bytes statistics_bytes = 0;  ///< of the gradient of one block
  Bytes workspace_bytes = 0;
  std::uint64_t micro_batch_tokens = 0;
  std::uint32_t micro_batches = 1;             ///< per training step, on each rank
  std::uint32_t evaluation_micro_batches = 1;  ///< per evaluation plan, at most micro_batches
  std::uint32_t world = 1;                     ///< ranks
  std::uint32_t stage = 0;                     ///< ZeRO stage, 0 to 3; no effect with one rank
  /// Stage 3: ranks that share one copy of the split weights (hpZ of ZeRO++), a divisor of
  /// `world`; 0: all of them.
  std::uint32_t weight_ranks = 0;
  /// Bytes of one weight (2 or 4) when gathers of split weights move WeightCodes, else 0.
  Bytes coded_weight = 0;

  [[nodiscard]] std::uint64_t tokens_per_step() const {
    return micro_batch_tokens * micro_batches * world;
  }
  [[nodiscard]] bool has_reference() const { return pairs_bytes > 0; }
  [[nodiscard]] std::uint32_t first_layer() const { return vocabulary_tiles; }
  /// The first block of the head.
  [[nodiscard]] std::uint32_t head() const {
    return static_cast<std::uint32_t>(blocks.size()) - (tied ? 1 : vocabulary_tiles);
  }
  [[nodiscard]] bool is_embedding(std::size_t block) const { return block < first_layer(); }
  [[nodiscard]] bool is_layer(std::size_t block) const {
    return block >= first_layer() && block < head();
  }
  [[nodiscard]] bool is_differentiated(std::size_t block) const {
    return block >= first_differentiated;
  }
  /// Whether the head adds to the gradient of the embedding's rows.
  [[nodiscard]] bool trains_tied() const { return tied_accumulator_bytes > 0; }
  /// Whether `block` is a tile of a layer, or the norm before some.
  [[nodiscard]] bool is_part_of_layer(std::size_t block) const {
    return is_layer(block) &&
           (blocks[block].continues || (is_layer(block + 1) && blocks[block + 1].continues));
  }
  [[nodiscard]] bool cuts_layers() const {
    for (std::uint32_t b = first_layer(); b < head(); ++b) {
      if (blocks[b].continues) return true;
    }
    return false;
  }
  /// The last block that continues `block`, or itself.
  [[nodiscard]] std::uint32_t last_tile(std::uint32_t block) const {
    while (block + 1 < blocks.size() && blocks[block + 1].continues) ++block;
    return block;
  }
  /// The block that the tile `block` continues, or itself.
  [[nodiscard]] std::uint32_t first_tile(std::uint32_t block) const {
    while (blocks[block].continues) --block;
    return block;
  }
  /// Whether the input of `block` waits for the backward pass in the memory of its placement.
  [[nodiscard]] bool places_input(std::size_t block) const {
    return is_layer(block) && is_differentiated(block) && !blocks[block].continues &&
           !blocks[block].mid_layer;
  }
  /// Whether `block` may keep intermediates: a layer in one piece or the second half of one, or the
  /// head if it has several tiles.
  [[nodiscard]] bool has_intermediates(std::size_t block) const {
    return (is_layer(block) && is_differentiated(block) &&
            (!is_part_of_layer(block) || blocks[block].mid_layer)) ||
           (block == head() && vocabulary_tiles > 1);
  }
  /// The block with the output matrix's tile `number`.
  [[nodiscard]] std::uint32_t block_of_tile(std::uint32_t number) const {
    return tied ? number : head() + number;
  }
};

}  // namespace ballast::step
