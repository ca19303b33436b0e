#pragma once

#include <span>

#include "ballast/core/units.h"
#include "ballast/core/view.h"
#include "ballast/model/architecture.h"

namespace ballast::engine {

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

}  // namespace ballast::engine
