#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "ballast/core/error.h"
#include "ballast/core/memory.h"
#include "ballast/model/architecture.h"
#include "ballast/model/attention.h"
#include "ballast/model/compute.h"
#include "ballast/model/family.h"

#include "src/model/compute/formulas.h"
#include "src/model/compute/kernel_arguments.h"
#include "src/model/compute/layer_shapes.h"
#include "src/model/compute/matrix.h"
#include "src/model/compute/sequence_exchange.h"
#include "src/model/compute/tensor_offsets.h"
#include "src/model/ops/device_ops.h"
#include "src/model/ops/row_arguments.h"

namespace ballast::model {

// Forward and backward of blocks, written once for all devices. `Ops` are the operations of one
// device (../ops/device_ops.h); their arguments are views of its memory.

/// The model that a pass computes. Without preference pairs it is always the policy.
enum class ModelRole : std::uint8_t {
  policy,    ///< the model that is trained
  reference  ///< the frozen weights that training began with, without adapters
};

/// Weights of one block, and gradients of its trained elements, the first ones. The gradients are
/// empty in a forward pass.
template <class T>
struct BlockWeights {
  std::size_t layer = 0;  ///< index among the blocks of layers, if it is one
  const T* weights = nullptr;
  DeviceView<float> gradient;
  Accumulation accumulation = Accumulation::later;
  Dropout dropout = {};
  ModelRole role = ModelRole::policy;

  [[nodiscard]] Norm<T> operator[](const NormAt& at) const {
    return {weights + at.weight, at.bias ? weights + *at.bias : nullptr,
            sum(at.weight),      at.bias ? sum(*at.bias) : nullptr,
            at.offset,           at.epsilon,
            at.centred};
  }
  /// Returns the sinks at `logits`, if there are any.
  [[nodiscard]] AttentionSinks<T> sinks(const std::optional<Elems>& logits) const {
    if (!logits) return {};
    return {weights + *logits, sum(*logits)};
  }
  [[nodiscard]] Linear<T> operator[](const LinearAt& at) const {
    return {weights + at.weight,
            at.bias ? weights + *at.bias : nullptr,
            sum(at.weight),
            at.bias ? sum(*at.bias) : nullptr,
            at.in,
            at.out,
            at.flipped,
            accumulation == Accumulation::first};
  }

 private:
  [[nodiscard]] float* sum(Elems offset) const {
    return offset < gradient.size() ? gradient.raw() + offset : nullptr;
  }
};

/// Values that layers share besides the residual stream (null: not there), see the ports of these
/// names.
template <class T>
struct LayerLinks {
  T* keys_values = nullptr;  ///< the forward pass of their layer writes them
  float* keys_values_gradient = nullptr;
  T* inputs = nullptr;  ///< the forward pass of the first layer writes them
  T* inputs_gradient = nullptr;
  const T* table_rows = nullptr;
  float* table_rows_gradient = nullptr;
  T* normed = nullptr;           ///< the result of the last norm, which experts read, too
  T* normed_gradient = nullptr;  ///< its gradient, to which the experts have added theirs
  bool backward = false;         ///< whether the call is a backward pass
};

/// Memory of a layer's values between its forward and backward pass. At most one is not null.
struct KeptValues {
  std::byte* all = nullptr;        ///< Port::kept
  std::byte* attention = nullptr;  ///< Port::kept_attention
};

/// The sequences of a micro-batch for layers.
struct LayerSequences {
  const std::int32_t* positions = nullptr;  ///< arguments of rotate(); may be null
  const std::int32_t* documents = nullptr;  ///< AttentionMask::positions
  SequenceSlice slice;
};

/// Adds the gradient of the bias of `map`, if wanted, given dy with rows `step` apart.
template <class Ops, class T>
void add_bias_gradient(Ops& ops, const Linear<T>& map, const T* dy, std::size_t step,
                       std::size_t rows) {
  if (map.bias_gradient == nullptr) return;
  ops.elementwise->add_column_sums(dy, step, map.bias_gradient, rows, map.out);
}

/// Number of rows per chunk, for equal chunks of at most `limit` bytes: a multiple of 16, unless
/// one chunk has all rows. `row`: bytes of a row.
inline std::size_t chunk_rows(std::size_t rows, Bytes row, Bytes limit) {
  constexpr std::size_t kStep = 16;
  const std::size_t most = std::max<std::size_t>(limit / row, kStep);
  const std::size_t chunks = (rows + most - 1) / most;
  return std::min(rows, round_up((rows + chunks - 1) / chunks, kStep));
}

}  // namespace ballast::model
