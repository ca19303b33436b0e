#pragma once

#include <cstddef>
#include <cstdint>

#include "ballast/cpu_adam/weight_checks.h"

namespace ballast::cpu_adam {
namespace {

/// The check values of whole blocks of weights: see WeightChecks. Each step of the hash is a
/// bijection. The shift lets the sign bits of several weights count.
inline void block_checks(const Bf16* weights, std::size_t blocks, std::uint16_t* values) noexcept {
  constexpr std::uint16_t kFactor = 0x9e37;
  for (std::size_t block = 0; block < blocks; ++block) {
    for (std::size_t column = 0; column < WeightChecks::kColumns; ++column) {
      std::uint16_t hash = 0;
      for (std::size_t row = 0; row < WeightChecks::kRows; ++row) {
        const std::uint16_t mixed = hash ^ weights[row * WeightChecks::kColumns + column].bits;
        const auto product = static_cast<std::uint16_t>(std::uint32_t{mixed} * kFactor);
        hash = product ^ (product >> 7U);
      }
      values[column] = hash;
    }
    weights += WeightChecks::kBlock;
    values += WeightChecks::kColumns;
  }
}

}  // namespace
}  // namespace ballast::cpu_adam
