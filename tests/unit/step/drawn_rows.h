#pragma once

#include <cstdint>

#include "ballast/core/random.h"
#include "ballast/model/step_program.h"

namespace ballast::step {

/// Which experts have rows. A draw decides, so that plans run with many choices of their routers.
struct DrawnRows {
  DrawnRows(const model::StepProgram& of, bool of_several_ranks, std::uint64_t from)
      : program(of), several(of_several_ranks), seed(from) {}

  [[nodiscard]] bool has_rows(std::uint32_t block, std::uint32_t micro, std::uint64_t run,
                              bool any_rank) const {
    const std::uint64_t draw = random_u64(seed, run, block * 64 + micro) % 6;
    return draw < 2 || (any_rank && several && draw == 2);
  }

  /// True for a block that needs no rows.
  [[nodiscard]] bool has_rows_in_run(std::uint32_t block, std::uint64_t run, std::uint32_t micros,
                                     bool any_rank) const {
    bool rows = !program.blocks[block].rows;
    for (std::uint32_t m = 0; m < micros; ++m) rows = rows || has_rows(block, m, run, any_rank);
    return rows;
  }

  const model::StepProgram& program;
  bool several;  ///< ranks
  std::uint64_t seed;
};

}  // namespace ballast::step
