#pragma once

#include <cstdint>

#include "ballast/core/error.h"

namespace ballast::step {

/// Bytes per parameter of each kind of model state.
struct StateBytes {
  double weights = 2.0;
  double gradients = 2.0;
  double optimizer = 12.0;
};

/// The sizes in the ZeRO paper for mixed-precision Adam: its K is an fp32 master weight and two
/// moments.
inline constexpr StateBytes kPaperStateBytes = {
    .weights = 2.0, .gradients = 2.0, .optimizer = 12.0};
/// The sizes of this engine for bf16 AdamW: the master's other 16 bits and two fp32 moments.
inline constexpr StateBytes kOwnStateBytes = {.weights = 2.0, .gradients = 2.0, .optimizer = 10.0};

/// Bytes of model states that one of `world` (at least 1) ranks holds for `parameters` parameters
/// under ZeRO's `stage` (0 to 3): optimizer states are split from stage 1, gradients from stage 2,
/// weights from stage 3. Table 1 and section 5 of arXiv 1910.02054. Throws Error(state) for another
/// stage or no rank.
inline StateBytes zero_memory(double parameters, std::uint64_t world, int stage,
                              const StateBytes& per_parameter = kPaperStateBytes) {
  expects(world > 0, "zero_memory: there must be a rank");
  expects(stage >= 0 && stage <= 3, "zero_memory: ZeRO has the stages 0 to 3");
  const auto share = [&](double bytes, int split_from) {
    const double whole = parameters * bytes;
    return stage >= split_from ? whole / static_cast<double>(world) : whole;
  };
  return {.weights = share(per_parameter.weights, 3),
          .gradients = share(per_parameter.gradients, 2),
          .optimizer = share(per_parameter.optimizer, 1)};
}

/// The sum of all three.
constexpr double total(const StateBytes& bytes) {
  return bytes.weights + bytes.gradients + bytes.optimizer;
}

}  // namespace ballast::step
