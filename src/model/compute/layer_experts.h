#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "ballast/core/dtype.h"
#include "ballast/core/memory.h"

#include "src/model/compute/adapted_maps.h"
#include "src/model/compute/formulas.h"
#include "src/model/compute/layer.h"
#include "src/model/compute/routing.h"
#include "src/model/compute/tensor_offsets.h"
#include "src/model/description/families/decoder.h"

namespace ballast::model {

/// Tensors of a LayerExpertsSpec in the block of its layer.
struct LayerExpertsAt {
  std::size_t count = 0;
  std::size_t per_token = 0;
  std::size_t width = 0;
  LinearAt router;
  NormAt router_norm;  ///< its weights are the router's scale
  Elems factors = 0;   ///< [count]
  Elems in = 0;        ///< [count, 2 width, H]
  Elems out = 0;       ///< [count, H, width]
  NormAt norm_before;
  NormAt norm_after;
  NormAt norm_after_mlp;
};

inline LayerExpertsAt find_layer_experts(const BlockSpec& block, const LayerExpertsSpec& spec) {
  return {.count = spec.count,
          .per_token = spec.per_token,
          .width = spec.width,
          .router = find_linear(block, spec.router),
          .router_norm = {.weight = block.tensor(spec.router_scale).offset},
          .factors = block.tensor(spec.factors).offset,
          .in = block.tensor(spec.in).offset,
          .out = block.tensor(spec.out).offset,
          .norm_before = find_norm(block, spec.norm_before),
          .norm_after = find_norm(block, spec.norm_after),
          .norm_after_mlp = find_norm(block, spec.norm_after_mlp)};
}

/// Experts in addition to the MLP of a layer, in its block (LayerExpertsSpec). They read the
/// residual stream x after attention. With y, the result of the MLP, the layer adds norm(norm(y) +
/// norm(experts(x))) to x. The rows of one expert are copied next to each other, a chunk at a time.
/// The numbers of rows are awaited, because they determine the products. Source: the class
/// Gemma4TextDecoderLayer of transformers.
template <class Ops>
class LayerExperts {
 public:
  using T = typename Ops::Value;

  /// `spec`: that of all layers with experts; none if no layer has any.
  LayerExperts(const LayerExpertsSpec& spec, std::size_t rows, std::size_t width, Ops& ops)
      : shape_({.rows = rows,
                .experts = spec.count,
                .per_token = spec.per_token,
                .renormalises = true}),
        width_(width),
        wide_(spec.width),
        chunk_(round_up(std::min(rows, kRows), kRowStep)),
        ops_(ops) {}

  void take_memory(Bump& bump) {
    if (shape_.experts == 0) return;
    const std::size_t size = shape_.rows * width_;
    results_ = bump.take<T>(size);
    normed_ = bump.take<T>(size);
    routed_ = bump.take<T>(size);
    both_ = bump.take<T>(size);
    sums_ = bump.take<float>(size);
    statistics_ = bump.take<GradientStats>(size / kStatsChunk + 1);
    routing_ = Routing::take(bump, shape_);
    logits_ = bump.take<float>(shape_.rows * shape_.step());
    dlogits_ = bump.take<T>(shape_.rows * shape_.step());
    starts_ = bump.take<std::int32_t>(shape_.experts + 1);
    products_ = bump.take<float>(chunk_);
    x_ = bump.take<T>(chunk_ * width_);
    dy_ = bump.take<T>(chunk_ * width_);
    part_ = bump.take<float>(chunk_ * width_);
    hidden_ = bump.take<T>(chunk_ * 2 * wide_);
    activated_ = bump.take<T>(chunk_ * wide_);
    scaled_ = bump.take<T>(chunk_ * wide_);
    dactivated_ = bump.take<T>(chunk_ * wide_);
  }

  /// Computes experts(x) for all rows.
  void forward(const BlockWeights<T>& block, const LayerExpertsAt& at, const T* x) {
    const std::size_t rows = shape_.rows;
    ops_.norms->norm(block[at.router_norm], x, routed_, rows);
    ops_.elementwise->scale(routed_, router_scale(), rows * width_);
    ops_.products->multiply({rows, shape_.experts, width_}, matrix(routed_, width_),
                            transposed(block[at.router].weight, width_),
                            matrix(logits_, shape_.step()));
    ops_.routers->route(shape_, logits_, {}, nullptr, routing_, starts_);
    first_choices_ = ops_.routers->fetch(starts_, shape_.experts + 1);
    ops_.norms->norm(block[at.norm_before], x, normed_, rows);
    ops_.elementwise->zero(sums_, rows * width_);
    by_chunks([&](std::size_t expert, const ExpertRows& chunk) {
      compute(block, at, expert, chunk);
      const Product p = forward_product(out_map(block, at, expert), scaled_, part_, width_,
                                        round_up(chunk.count, kRowStep));
      ops_.products->multiply(p.extents, p.a, p.b, p.c);
      ops_.experts->add_rows(chunk, part_, routing_.weights, sums_, width_);
    });
    round(sums_, results_);
  }
  /// Adds the MLP's results y of `rows`, and those of the experts, to x.
  void join(const BlockWeights<T>& block, const LayerExpertsAt& at, const Norm<T>& last,
            const MapRows& rows, const T* y, const T* x, T* out) {
    join_norms(block, at, rows, y);
    ops_.norms->norm(last, both_ + rows.first * width_, out, rows.count, x);
  }
  /// Backward pass of join(), except for x. `dout`: gradient of its result. Turns y into its
  /// gradient, and keeps that of the experts for backward().
  void join_backward(const BlockWeights<T>& block, const LayerExpertsAt& at, const Norm<T>& last,
                     const MapRows& rows, T* y, const T* dout) {
    join_norms(block, at, rows, y);
    T* const both = both_ + rows.first * width_;
    T* const results = results_ + rows.first * width_;
    ops_.norms->norm_backward(last, both, dout, nullptr, both, rows.count);
    ops_.norms->norm_backward(block[at.norm_after], results, both, nullptr, results, rows.count);
    ops_.norms->norm_backward(block[at.norm_after_mlp], y, both, nullptr, y, rows.count);
  }
  /// Backward pass of forward(), after join_backward() of all rows. Adds the gradient of x to dx.
  void backward(const BlockWeights<T>& block, const LayerExpertsAt& at, const T* x, T* dx) {
    const std::size_t rows = shape_.rows;
    ops_.elementwise->zero(sums_, rows * width_);
    ops_.elementwise->zero(routing_.weight_gradients, shape_.choices());
    by_chunks([&](std::size_t expert, const ExpertRows& chunk) {
      differentiate(block, at, expert, chunk);
    });
    round(sums_, both_);
    ops_.norms->norm_backward(block[at.norm_before], x, both_, dx, dx, rows);

    ops_.routers->router_gradient(shape_, routing_, {}, {}, dlogits_);
    ops_.products->linear_weight(block[at.router], routed_, dlogits_, shape_.step(), rows);
    ops_.products->linear_input(block[at.router], dlogits_, shape_.step(), both_, rows);
    ops_.elementwise->scale(both_, router_scale(), rows * width_);
    ops_.norms->norm_backward(block[at.router_norm], x, both_, dx, dx, rows);
  }

 private:
  static constexpr std::size_t kRows = 2048;  ///< rows of an expert at once
  /// Chunks are padded with zeros to a multiple of this many rows, so that products have few
  /// shapes.
  static constexpr std::size_t kRowStep = 16;

  [[nodiscard]] float router_scale() const {
    return static_cast<float>(1.0 / std::sqrt(static_cast<double>(width_)));
  }
  void round(const float* sums, T* to) {
    ops_.packing->pack({.rest = sums}, to, shape_.rows * width_, statistics_, nullptr);
  }
  void join_norms(const BlockWeights<T>& block, const LayerExpertsAt& at, const MapRows& rows,
                  const T* y) {
    T* const both = both_ + rows.first * width_;
    ops_.norms->norm(block[at.norm_after], results_ + rows.first * width_, both, rows.count);
    ops_.norms->norm(block[at.norm_after_mlp], y, both, rows.count, both);
  }

  /// Calls work(expert, choices) for each chunk of each expert that has rows.
  template <class Work>
  void by_chunks(const Work& work) const {
    for (std::size_t e = 0; e < shape_.experts; ++e) {
      const auto end = static_cast<std::size_t>(first_choices_[e + 1]);
      for (auto first = static_cast<std::size_t>(first_choices_[e]); first < end; first += chunk_) {
        work(e,
             ExpertRows{routing_.places + first, std::min(chunk_, end - first), shape_.per_token});
      }
    }
  }
  /// Maps of one expert. Their gradients are cleared before, since an expert may have no rows.
  [[nodiscard]] Linear<T> map_of(BlockWeights<T> block, const LinearAt& map) const {
    block.accumulation = Accumulation::later;
    return block[map];
  }
  [[nodiscard]] Linear<T> in_map(const BlockWeights<T>& block, const LayerExpertsAt& at,
                                 std::size_t expert) const {
    return map_of(block, {.weight = at.in + expert * 2 * wide_ * width_,
                          .in = width_,
                          .out = 2 * wide_,
                          .flipped = true});
  }
  [[nodiscard]] Linear<T> out_map(const BlockWeights<T>& block, const LayerExpertsAt& at,
                                  std::size_t expert) const {
    return map_of(
        block,
        {.weight = at.out + expert * wide_ * width_, .in = wide_, .out = width_, .flipped = true});
  }
  [[nodiscard]] GateUp<T> gate_up(std::size_t rows) const {
    return {hidden_, hidden_ + wide_, 2 * wide_, rows, wide_};
  }
  /// Computes the inputs of an expert's last map, without and with the expert's factor.
  void compute(const BlockWeights<T>& block, const LayerExpertsAt& at, std::size_t expert,
               const ExpertRows& chunk) {
    const std::size_t rows = round_up(chunk.count, kRowStep);
    ops_.experts->gather_rows(chunk, normed_, nullptr, x_, rows, width_);
    ops_.products->linear(in_map(block, at, expert), x_, hidden_, 2 * wide_, rows);
    ops_.elementwise->glu({Activation::gelu_tanh}, gate_up(rows), activated_);
    const std::size_t size = rows * wide_;
    ops_.elementwise->copy_bytes(reinterpret_cast<const std::byte*>(activated_),
                                 reinterpret_cast<std::byte*>(scaled_), size * sizeof(T));
    ops_.elementwise->scale_by(block.weights + at.factors + expert, 1, scaled_, size);
  }
  void differentiate(const BlockWeights<T>& block, const LayerExpertsAt& at, std::size_t expert,
                     const ExpertRows& chunk) {
    compute(block, at, expert, chunk);
    const std::size_t rows = round_up(chunk.count, kRowStep);
    const Linear<T> out = out_map(block, at, expert);
    ops_.experts->gather_rows(chunk, results_, routing_.weights, dy_, rows, width_);
    ops_.products->linear_weight(out, scaled_, dy_, width_, rows);
    ops_.products->linear_input(out, dy_, width_, dactivated_, rows);
    ops_.experts->dot_rows(chunk, scaled_, dactivated_, routing_.weights, routing_.weight_gradients,
                           wide_);
    add_factor_gradient(block, at.factors + expert, chunk.count);
    ops_.elementwise->scale_by(block.weights + at.factors + expert, 1, dactivated_, rows * wide_);
    const Linear<T> in = in_map(block, at, expert);
    ops_.elementwise->glu_backward({Activation::gelu_tanh}, gate_up(rows), dactivated_);
    ops_.products->linear_weight(in, x_, hidden_, 2 * wide_, rows);
    ops_.products->linear_input_part(in, hidden_, 2 * wide_, part_, rows);
    ops_.experts->add_rows(chunk, part_, nullptr, sums_, width_);
  }
  /// Adds the sum of the products of activated values and gradients of scaled ones.
  void add_factor_gradient(const BlockWeights<T>& block, Elems factor, std::size_t rows) {
    float* const gradient = block[NormAt{.weight = factor}].weight_gradient;
    if (gradient == nullptr) return;
    ops_.experts->dot_rows({nullptr, rows, 1}, activated_, dactivated_, nullptr, products_, wide_);
    ops_.elementwise->add_sum(products_, rows, gradient);
  }

  RouterShape shape_;
  std::size_t width_;
  std::size_t wide_;
  std::size_t chunk_;
  Ops& ops_;
  T* results_ = nullptr;  ///< [N, H] of the experts, then their gradient
  T* normed_ = nullptr;   ///< [N, H] input of the experts
  T* routed_ = nullptr;   ///< [N, H] input of the router
  T* both_ = nullptr;     ///< [N, H] sum of the MLP and the experts, and scratch
  float* sums_ = nullptr;
  GradientStats* statistics_ = nullptr;  ///< scratch of the rounding
  Routing routing_;
  float* logits_ = nullptr;                      ///< [N, step]
  T* dlogits_ = nullptr;                         ///< [N, step]
  std::int32_t* starts_ = nullptr;               ///< [experts + 1]
  std::span<const std::int32_t> first_choices_;  ///< `starts_` in host memory
  float* products_ = nullptr;                    ///< [chunk], of activated values and gradients
  T* x_ = nullptr;                               ///< [chunk, H]
  T* dy_ = nullptr;                              ///< [chunk, H]
  float* part_ = nullptr;                        ///< [chunk, H]
  T* hidden_ = nullptr;                          ///< [chunk, gate | up]
  T* activated_ = nullptr;                       ///< [chunk, I]
  T* scaled_ = nullptr;                          ///< [chunk, I], times the expert's factor
  T* dactivated_ = nullptr;                      ///< [chunk, I]
};

}  // namespace ballast::model
