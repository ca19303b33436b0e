#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ballast/core/units.h"
#include "ballast/model/step_program.h"
#include "ballast/step/program_table.h"

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
/// plans, ranks are those that share the same tensors: the sharers of core/mesh.h.
struct Problem {
  std::shared_ptr<const ProgramTable> table;  ///< the model's step program
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

  [[nodiscard]] const model::StepProgram& program() const { return table->program(); }
  [[nodiscard]] const std::string& name_of(std::size_t block) const {
    return program().blocks[block].name;
  }
  [[nodiscard]] std::uint64_t tokens_per_step() const {
    return micro_batch_tokens * micro_batches * sharers;
  }
};

}  // namespace ballast::step
