#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "ballast/core/memory.h"
#include "ballast/core/units.h"
#include "ballast/engine/blueprint.h"
#include "ballast/model/architecture.h"
#include "ballast/plan/plan.h"
#include "ballast/state/store.h"
#include "ballast/state/swap_plan.h"

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

/// A piece of this rank's part of a block's weights, or of the states of one of its sub-groups, in
/// host memory.
struct HomePiece {
  std::uint32_t block = 0;
  bool states = false;  ///< states or weights
  std::uint32_t sub_group = 0;
  Bytes offset = 0;  ///< first byte within this rank's part
  HostBytes bytes;
  /// Set by the visitor that fills the piece: `bytes` from this index on are zero, so NVMe need not
  /// be written there.
  Bytes zeros_from = bytes.size();
};

/// Fills or reads pieces. The pieces of a plan come one at a time: by block, a block's weights
/// before its states, the states by sub-group, each in ascending order.
using Visitor = std::function<void(HomePiece&)>;
/// Runs a plan that fills or reads homes and calls the visitor with their pieces. No other plan may
/// run. Throws Error.
using Perform = std::function<void(const plan::Plan& plan, const Visitor& visitor)>;

/// Provides initial weights. Several threads may call it concurrently.
class WeightSource {
 public:
  virtual ~WeightSource() = default;

  /// Writes the fp32 values of elements [first, first + out.size()) of one tensor to `out`. Throws
  /// Error if it has none. Training in bf16 calls it for weights and again for their remainders.
  virtual void read(const model::TensorSpec& tensor, Elems first, std::span<float> out) = 0;

  /// Returns whether read_bf16() provides the tensor, because bf16 represents all of its values
  /// exactly.
  [[nodiscard]] virtual bool is_bf16(const model::TensorSpec& /*tensor*/) { return false; }
  /// Writes the bf16 values of elements from `first` on to `out`, 2 bytes each. Training in bf16
  /// calls it instead of read() for such tensors, and only for the weights, because all remainders
  /// are zero.
  virtual void read_bf16(const model::TensorSpec& /*tensor*/, Elems /*first*/, HostBytes /*out*/) {}

  /// Returns whether read() has the magnitudes of adapters; otherwise they are computed from their
  /// maps.
  [[nodiscard]] virtual bool has_magnitudes() { return false; }

  /// Writes the codes of a quantised tensor to `out`, laid out as in model::QuantizedArrays, and
  /// returns true. Returns false if it has only values, which are then encoded. `out` is zeroed.
  virtual bool read_codes(const model::TensorSpec& /*tensor*/, HostBytes /*out*/) { return false; }
};

/// A home on NVMe that a checkpoint keeps in place.
struct KeptHome {
  std::size_t block = 0;
  bool states = false;  ///< states or weights
  /// Sub-group of states. For weights: 1 for the frozen ones, if the trained ones have a separate
  /// home.
  std::uint32_t sub_group = 0;
  state::KeptExtent content;
  /// This rank's part of the arrays in the home, each with the offset of its first byte.
  std::vector<std::pair<StateRange, Bytes>> ranges;
};

/// States that a checkpoint keeps in the swap files of a rank.
struct KeptStates {
  state::SwapImage image;
  std::vector<KeptHome> homes;
};

/// Returns all arrays of all blocks that are not empty, whole, as all ranks together keep them.
std::vector<StateRange> whole_ranges(const Blueprint& blueprint);

/// Returns this rank's part of weights and states on `homes`: its shards of all arrays, in block
/// order, weights first. The parts of all ranks make up the whole.
std::vector<StateRange> saved_ranges(const Blueprint& blueprint, step::Homes homes = {});
/// Returns the ranges in host memory, in the order in which a step first writes to them.
std::vector<StateRange> background_ranges(const Blueprint& blueprint);

/// Receives the bytes of a range. May throw.
using StateSink = std::function<void(const StateRange& range, ConstHostBytes bytes)>;
/// Writes the bytes of a range to `bytes`. Throws Error if it has none.
using StateSource = std::function<void(const StateRange& range, HostBytes bytes)>;

}  // namespace ballast::engine
