#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "ballast/core/units.h"
#include "ballast/core/view.h"
#include "ballast/engine/blueprint.h"
#include "ballast/state/store.h"
#include "ballast/state/swap_plan.h"

namespace ballast::engine {

/// The arrays that training keeps of a block.
enum class StateKind : std::uint8_t {
  weights,     ///< in the training type
  remainders,  ///< low halves of the fp32 masters of bf16 weights
  masters,     ///< fp32 masters of fp16 weights
  first_moments,
  second_moments,
  first_exponents,  ///< of 8-bit moments, one for cpu_adam::Codes::kBlock of them
  second_exponents,
  codes  ///< of a quantised base: bytes behind the weights, see model::BlockCodes
};

/// "weights", "remainders", "first_moments", ...
std::string_view to_string(StateKind kind) noexcept;
/// The kind of that name; empty for other names.
std::optional<StateKind> state_kind(std::string_view name) noexcept;

/// Entries [first, first + count) of an array of a block. The same entries have the same bytes in
/// every placement, stage and number of ranks, with and without expert parallelism.
struct StateRange {
  std::size_t block = 0;  ///< its number in the model without expert parallelism
  StateKind kind = StateKind::weights;
  Elems first = 0;
  Elems count = 0;
  Bytes width = 0;  ///< bytes of an entry

  [[nodiscard]] Bytes bytes() const { return count * width; }
  bool operator==(const StateRange&) const = default;
};

/// A home on NVMe that a checkpoint keeps where it is.
struct KeptHome {
  std::size_t block = 0;
  bool states = false;  ///< states or weights
  /// Of the states; of weights 1 for the frozen ones, if the trained ones have a home of their own.
  std::uint32_t sub_group = 0;
  state::KeptExtent content;
  /// This rank's part of the arrays in it, each with the offset of its first byte in the home.
  std::vector<std::pair<StateRange, Bytes>> ranges;
};

/// What a checkpoint keeps in the swap files of a rank.
struct KeptStates {
  state::SwapImage image;
  std::vector<KeptHome> homes;
};

/// All arrays of all blocks that are not empty, whole, as the ranks together keep them.
std::vector<StateRange> whole_ranges(const Blueprint& blueprint);

/// Receives the bytes of a range. May throw.
using StateSink = std::function<void(const StateRange& range, ConstHostBytes bytes)>;
/// Writes the bytes of a range to `bytes`. Throws Error when it has none.
using StateSource = std::function<void(const StateRange& range, HostBytes bytes)>;

}  // namespace ballast::engine
