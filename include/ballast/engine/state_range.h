#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "ballast/core/units.h"

namespace ballast::engine {

/// The arrays of a block that training keeps.
enum class StateKind : std::uint8_t {
  weights,     ///< in the training type
  remainders,  ///< low halves of the fp32 masters of bf16 weights
  masters,     ///< fp32 masters of fp16 weights
  first_moments,
  second_moments,
  first_exponents,  ///< exponents of 8-bit moments, one per cpu_adam::Codes::kBlock
  second_exponents,
  codes  ///< bytes of a quantised base after the weights, see model::BlockCodes
};

/// Returns "weights", "remainders", "first_moments", ...
std::string_view to_string(StateKind kind) noexcept;
/// Returns the kind with that name; empty for other names.
std::optional<StateKind> state_kind(std::string_view name) noexcept;

/// Entries [first, first + count) of an array of a block. The same entries have the same bytes in
/// every placement, stage and number of ranks, with and without expert parallelism.
struct StateRange {
  std::size_t block = 0;  ///< number of the block in the model without expert parallelism
  StateKind kind = StateKind::weights;
  Elems first = 0;
  Elems count = 0;
  Bytes width = 0;  ///< bytes per entry

  [[nodiscard]] Bytes bytes() const { return count * width; }
  bool operator==(const StateRange&) const = default;
};

}  // namespace ballast::engine
