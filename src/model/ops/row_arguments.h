#pragma once

#include <cstddef>

namespace ballast::model {

// Arguments of operations on rows of activations, as views of device memory.

/// Gate and up of a gated MLP, [rows, width] each; rows of both are `step` elements apart.
template <class T>
struct GateUp {
  T* gate = nullptr;
  T* up = nullptr;
  std::size_t step = 0;
  std::size_t rows = 0;
  std::size_t width = 0;
};

/// Equal parts of the first columns of each row: the heads of queries or keys, or all of them as
/// one.
struct Groups {
  std::size_t rows = 0;
  std::size_t count = 1;  ///< groups per row
  std::size_t width = 0;  ///< columns per group
};

/// Elements between the starts of rows, and between those of a row's groups. Groups 0 elements
/// apart are the same group.
struct GroupSteps {
  std::size_t row = 0;
  std::size_t group = 0;
};

/// Cosines and sines of rotary positions, [whole length, half] each, or [N, half] if by_row.
struct Angles {
  float* cosine = nullptr;
  float* sine = nullptr;
  std::size_t half = 0;      ///< the first 2 * half values of a head rotate
  bool interleaved = false;  ///< see Rotary
  /// True: one row of angles per row of the micro-batch, because frequencies depend on the
  /// document's length. False: one per position.
  bool by_row = false;
};

/// Weights of a norm. Gradients that are not wanted are null.
template <class T>
struct Norm {
  const T* weight = nullptr;
  const T* bias = nullptr;
  float* weight_gradient = nullptr;
  float* bias_gradient = nullptr;
  float offset = 0.0F;   ///< for an RMSNorm: values are multiplied by offset + weight
  float epsilon = 0.0F;  ///< 0: the model's
  bool centred = false;  ///< LayerNorm; false: RMSNorm, unless there is a bias

  [[nodiscard]] float epsilon_or(float of_model) const {
    return epsilon > 0.0F ? epsilon : of_model;
  }
};

}  // namespace ballast::model
