#pragma once

#include <cstdint>

#include "ballast/core/dtype.h"
#include "ballast/core/units.h"

namespace ballast::cpu_adam {

/// Check values of bf16 weights, which show whether weights were changed. Each block of kBlock
/// consecutive weights has kColumns check values of 16 bits. Each value is a hash of every
/// kColumns-th weight, so that vectors of any width compute it. It differs if one of these weights
/// differs, and with a probability of 1 - 2^-16 if several differ. Weights missing in the last
/// block count as zero.
struct WeightChecks {
  static constexpr Elems kColumns = 16;
  static constexpr Elems kRows = 8;
  static constexpr Elems kBlock = kColumns * kRows;

  /// Number of check values of `elements` weights.
  static constexpr Elems values_of(Elems elements) {
    return (elements + kBlock - 1) / kBlock * kColumns;
  }
};

/// Writes values_of(count) check values, on the calling thread. The same for every instruction set.
void compute_checks(const Bf16* weights, Elems count, std::uint16_t* values);

}  // namespace ballast::cpu_adam
