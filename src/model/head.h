#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "src/model/layer.h"

namespace ballast::model {

/// Final norm, output matrix and cross-entropy. Logits exist for a chunk of rows at a time. `Ops`:
/// layer.h.
template <class Ops>
class Head {
 public:
  using T = typename Ops::Value;

  Head(const ModelConfig& config, std::size_t tokens, Ops& ops)
      : tokens_(tokens),
        width_(config.hidden_size),
        vocabulary_(config.vocab_size),
        logit_row_(round_up(config.vocab_size, 16)),
        chunk_(chunk_rows(tokens, logit_row_)),
        ops_(ops) {}

  void take_memory(Bump& bump) {
    normed_ = bump.take<T>(tokens_ * width_);
    dnormed_ = bump.take<T>(tokens_ * width_);
    losses_ = bump.take<double>(tokens_);
    logits_ = bump.take<float>(chunk_ * logit_row_);
  }

  /// *loss_sum = sum of the rows' losses.
  void forward(const Norm<T>& norm, const T* output, const T* in, const std::int32_t* targets,
               double* loss_sum) {
    ops_.norm(norm, in, normed_, tokens_);
    for (std::size_t first = 0; first < tokens_; first += chunk_) {
      const std::size_t rows = std::min(chunk_, tokens_ - first);
      project(output, first, rows);
      ops_.cross_entropy(logits_, rows, logit_row_, targets + first, nullptr, losses_ + first);
    }
    ops_.sum_losses(losses_, tokens_, loss_sum);
  }

  /// Also computes dx and the gradients of scale * loss; overwrites `output_gradient` [V, H] or
  /// adds to it.
  void train(const Norm<T>& norm, const T* output, float* output_gradient,
             Accumulation accumulation, const T* in, const std::int32_t* targets, float scale,
             T* dx, double* loss_sum) {
    // Gradients are narrower than logits and replace them from each row's start.
    const std::size_t gradient_row = logit_row_ * sizeof(float) / sizeof(T);
    const T* const dlogits = reinterpret_cast<const T*>(logits_);
    ops_.norm(norm, in, normed_, tokens_);
    for (std::size_t first = 0; first < tokens_; first += chunk_) {
      const std::size_t rows = std::min(chunk_, tokens_ - first);
      const std::size_t at = first * width_;
      project(output, first, rows);
      ops_.cross_entropy(logits_, rows, logit_row_, targets + first, &scale, losses_ + first);
      ops_.multiply({rows, width_, vocabulary_}, matrix(dlogits, gradient_row),
                    matrix(output, width_), matrix(dnormed_ + at, width_));
      ops_.multiply({vocabulary_, width_, rows}, transposed(dlogits, gradient_row),
                    matrix(normed_ + at, width_), matrix(output_gradient, width_),
                    first > 0 || accumulation == Accumulation::later);
    }
    ops_.norm_backward(norm, in, dnormed_, nullptr, dx, tokens_);
    ops_.sum_losses(losses_, tokens_, loss_sum);
  }

 private:
  static constexpr std::size_t kRowStep = 16;

  /// Rows of equal chunks of at most Ops::kLogitBytes (but at least a few rows).
  static std::size_t chunk_rows(std::size_t tokens, std::size_t logit_row) {
    const std::size_t most =
        std::max<std::size_t>(Ops::kLogitBytes / (logit_row * sizeof(float)), kRowStep);
    const std::size_t chunks = (tokens + most - 1) / most;
    const std::size_t rows = round_up((tokens + chunks - 1) / chunks, kRowStep);
    return std::min(tokens, rows);
  }

  /// Logits of rows [first, first + rows).
  void project(const T* output, std::size_t first, std::size_t rows) {
    ops_.multiply({rows, vocabulary_, width_}, matrix(normed_ + first * width_, width_),
                  transposed(output, width_), matrix(logits_, logit_row_));
  }

  std::size_t tokens_;
  std::size_t width_;
  std::size_t vocabulary_;
  std::size_t logit_row_;  ///< floats from one row of logits to the next
  std::size_t chunk_;      ///< rows
  Ops& ops_;
  T* normed_ = nullptr;   ///< [tokens, width]
  T* dnormed_ = nullptr;  ///< [tokens, width]
  float* logits_ = nullptr;
  double* losses_ = nullptr;  ///< [tokens]
};

}  // namespace ballast::model
