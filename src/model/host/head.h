#pragma once

#include <cstddef>
#include <cstdint>

#include "src/model/host/layer.h"

namespace ballast::model::host {

/// Final norm, output matrix and cross-entropy. Logits exist for a chunk of rows at a time.
template <class T>
class Head {
 public:
  Head(const ModelConfig& config, std::size_t tokens, Ops<T>& ops);

  void take_memory(Bump& bump);

  /// Sum of the rows' losses.
  double forward(const Norm<T>& norm, const T* output, const T* in, const std::int32_t* targets);
  /// Also dx and the gradients of scale * loss; `output_gradient` [V, H] is added to.
  double train(const Norm<T>& norm, const T* output, float* output_gradient, const T* in,
               const std::int32_t* targets, float scale, T* dx);

 private:
  /// Logits of rows [first, first + rows).
  void project(const T* output, std::size_t first, std::size_t rows);
  /// Losses of those rows; logits become their gradients when `scale` is not null.
  void losses(const std::int32_t* targets, std::size_t first, std::size_t rows, const float* scale);
  [[nodiscard]] double sum_losses() const;

  std::size_t tokens_;
  std::size_t width_;
  std::size_t vocabulary_;
  std::size_t logit_row_;  ///< floats from one row of logits to the next
  std::size_t chunk_;      ///< rows
  Ops<T>& ops_;
  T* normed_ = nullptr;   ///< [tokens, width]
  T* dnormed_ = nullptr;  ///< [tokens, width]
  float* logits_ = nullptr;
  double* losses_ = nullptr;  ///< [tokens]
};

}  // namespace ballast::model::host
