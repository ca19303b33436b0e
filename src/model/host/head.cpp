#include "src/model/host/head.h"

#include <algorithm>

namespace ballast::model::host {
namespace {

constexpr Bytes kLogitBytes = 64 * kMiB;
constexpr std::size_t kRowStep = 16;

/// Rows of equal chunks that keep within kLogitBytes (but at least a few rows).
std::size_t chunk_rows(std::size_t tokens, std::size_t logit_row) {
  const std::size_t most = std::max(kLogitBytes / (logit_row * sizeof(float)), kRowStep);
  const std::size_t chunks = (tokens + most - 1) / most;
  const std::size_t rows = round_up((tokens + chunks - 1) / chunks, kRowStep);
  return std::min(tokens, rows);
}

}  // namespace

template <class T>
Head<T>::Head(const ModelConfig& config, std::size_t tokens, Ops<T>& ops)
    : tokens_(tokens),
      width_(config.hidden_size),
      vocabulary_(config.vocab_size),
      logit_row_(round_up(config.vocab_size, 16)),
      chunk_(chunk_rows(tokens, logit_row_)),
      ops_(ops) {}

template <class T>
void Head<T>::take_memory(Bump& bump) {
  normed_ = bump.take<T>(tokens_ * width_);
  dnormed_ = bump.take<T>(tokens_ * width_);
  losses_ = bump.take<double>(tokens_);
  logits_ = bump.take<float>(chunk_ * logit_row_);
}

template <class T>
void Head<T>::project(const T* output, std::size_t first, std::size_t rows) {
  ops_.products().multiply({rows, vocabulary_, width_}, matrix(normed_ + first * width_, width_),
                           transposed(output, width_), matrix(logits_, logit_row_));
}

template <class T>
void Head<T>::losses(const std::int32_t* targets, std::size_t first, std::size_t rows,
                     const float* scale) {
  split(rows, 1, [&](Range r) {
    for (std::size_t i = r.begin; i < r.end; ++i) {
      float* const row = logits_ + i * logit_row_;
      // The gradient replaces the logits, narrower, from the row's start.
      T* const gradient = scale == nullptr ? nullptr : reinterpret_cast<T*>(row);
      losses_[first + i] = ops_.kernels().cross_entropy(
          row, vocabulary_, static_cast<std::size_t>(targets[first + i]),
          scale == nullptr ? 0.0F : *scale, gradient);
    }
  });
}

template <class T>
double Head<T>::sum_losses() const {
  double sum = 0.0;
  for (std::size_t i = 0; i < tokens_; ++i) sum += losses_[i];
  return sum;
}

template <class T>
double Head<T>::forward(const Norm<T>& norm, const T* output, const T* in,
                        const std::int32_t* targets) {
  ops_.norm(norm, in, normed_, tokens_);
  for (std::size_t first = 0; first < tokens_; first += chunk_) {
    const std::size_t rows = std::min(chunk_, tokens_ - first);
    project(output, first, rows);
    losses(targets, first, rows, nullptr);
  }
  return sum_losses();
}

template <class T>
double Head<T>::train(const Norm<T>& norm, const T* output, float* output_gradient, const T* in,
                      const std::int32_t* targets, float scale, T* dx) {
  const std::size_t gradient_row = logit_row_ * sizeof(float) / sizeof(T);
  const T* const dlogits = reinterpret_cast<const T*>(logits_);
  ops_.norm(norm, in, normed_, tokens_);
  for (std::size_t first = 0; first < tokens_; first += chunk_) {
    const std::size_t rows = std::min(chunk_, tokens_ - first);
    const std::size_t at = first * width_;
    project(output, first, rows);
    losses(targets, first, rows, &scale);
    ops_.products().multiply({rows, width_, vocabulary_}, matrix(dlogits, gradient_row),
                             matrix(output, width_), matrix(dnormed_ + at, width_));
    ops_.products().multiply({vocabulary_, width_, rows}, transposed(dlogits, gradient_row),
                             matrix(normed_ + at, width_), matrix(output_gradient, width_), true);
  }
  ops_.norm_backward(norm, in, dnormed_, nullptr, dx, tokens_);
  return sum_losses();
}

template class Head<float>;
template class Head<Bf16>;

}  // namespace ballast::model::host
