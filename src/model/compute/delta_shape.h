#pragma once

#include <cstddef>
#include <cstdint>

#include "src/model/spec/delta_chunk.h"

namespace ballast::model {

/// Extents of a gated delta net (DeltaSpec). A row of its inputs is [queries | keys | values] of
/// all heads, the channels, followed by a gate per value of the results, and by `b` and `a` per
/// head of values.
struct DeltaShape {
  std::size_t sequences = 1;
  std::size_t length = 1;       ///< rows per sequence
  std::size_t key_heads = 0;    ///< heads of queries and of keys; 0: there is no delta net
  std::size_t value_heads = 0;  ///< a multiple of key_heads
  std::size_t key_width = 0;    ///< values of a head of queries or keys
  std::size_t value_width = 0;  ///< values of a head of values
  std::size_t taps = 0;         ///< rows that the convolution reads for a row, including its own

  static constexpr std::size_t kChunk = kDeltaChunk;
  /// Chunks per state that the forward pass keeps.
  static constexpr std::size_t kChunksOfState = 8;

  [[nodiscard]] constexpr std::size_t tokens() const { return sequences * length; }
  [[nodiscard]] constexpr std::size_t keys() const { return key_heads * key_width; }
  [[nodiscard]] constexpr std::size_t values() const { return value_heads * value_width; }
  [[nodiscard]] constexpr std::size_t channels() const { return 2 * keys() + values(); }
  /// Columns of a row of the inputs, and where its parts begin.
  [[nodiscard]] constexpr std::size_t row() const { return betas_at() + 2 * value_heads; }
  [[nodiscard]] constexpr std::size_t gates_at() const { return channels(); }
  [[nodiscard]] constexpr std::size_t betas_at() const { return channels() + values(); }
  [[nodiscard]] constexpr std::size_t chunks() const { return (length + kChunk - 1) / kChunk; }
  /// Elements of the state of one head.
  [[nodiscard]] constexpr std::size_t state() const { return key_width * value_width; }
  /// Number of states per head of a sequence that the forward pass keeps.
  [[nodiscard]] constexpr std::size_t kept_states() const {
    return (chunks() + kChunksOfState - 1) / kChunksOfState;
  }
  /// Elements of all kept states.
  [[nodiscard]] constexpr std::size_t states() const {
    return sequences * value_heads * kept_states() * state();
  }
};

/// Inputs of the recurrence of a gated delta net, for all rows of a micro-batch.
template <class T>
struct DeltaInputs {
  const T* channels = nullptr;  ///< [N, channels()], after the convolution
  const T* betas = nullptr;     ///< `b` and `a` of the first row; rows are `betas_step` apart
  std::size_t betas_step = 0;
  const T* decay = nullptr;  ///< A_log [value_heads]
  const T* shift = nullptr;  ///< dt_bias [value_heads]
  /// AttentionMask::positions.
  const std::int32_t* positions = nullptr;
};

/// Gradients of DeltaInputs. Those of `decay` and `shift` are added; null: not wanted.
template <class T>
struct DeltaGradients {
  T* channels = nullptr;  ///< rows are `step` apart
  T* betas = nullptr;     ///< rows are `step` apart
  std::size_t step = 0;
  float* decay = nullptr;
  float* shift = nullptr;
};

/// A causal convolution of each channel with its own weights, followed by SiLU. Rows before the
/// document of a row count as zeros.
template <class T>
struct Convolution {
  const T* weight = nullptr;  ///< [channels, taps]; the last one belongs to the row itself
  float* weight_gradient = nullptr;
  const std::int32_t* positions = nullptr;  ///< AttentionMask::positions
};

}  // namespace ballast::model
