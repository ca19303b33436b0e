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
#include "src/model/compute/mlp_part.h"
#include "src/model/compute/part.h"
#include "src/model/compute/routing.h"

namespace ballast::model {

/// An MLP and experts in the block of their layer (MlpWithExpertsSpec). The experts read
/// the residual stream x. With y, the result of the MLP, the sum is norm(y) + norm(experts(x)). The
/// rows of one expert are copied next to each other, a chunk at a time. The numbers of rows are
/// awaited, because they determine the products. Source: the class Gemma4TextDecoderLayer of
/// transformers.
template <class T>
class MlpWithExpertsPart final : public LayerPart<T> {
 public:
  using typename LayerPart<T>::Call;

  MlpWithExpertsPart(const MlpWithExpertsSpec& spec, const Binder& binder, LayerTools<T>& tools)
      : LayerPart<T>(tools),
        mlp_(spec.mlp, binder, tools),
        shape_({.rows = tools.rows(),
                .experts = spec.experts.count,
                .per_token = spec.experts.per_token,
                .renormalises = true}),
        width_(tools.hidden),
        wide_(spec.experts.width),
        chunk_(round_up(std::min(shape_.rows, kRows), kRowStep)),
        router_(binder.map({spec.experts.router}, width_, shape_.experts)),
        router_norm_({.weight = binder.offset(spec.experts.router_scale)}),
        factors_(binder.offset(spec.experts.factors)),
        in_(binder.offset(spec.experts.in)),
        out_(binder.offset(spec.experts.out)),
        norm_before_(binder.norm({spec.experts.norm_before})),
        norm_after_(binder.norm({spec.experts.norm_after})),
        norm_after_mlp_(binder.norm({spec.experts.norm_after_mlp})) {}

  void share(ArrayList& list, const LayerMoments& at, const SharedPlaces& places,
             std::size_t chunk) override {
    mlp_.share(list, at, places, chunk);
  }
  void for_maps(const std::function<void(const LinearAt&, std::size_t)>& visit) const override {
    mlp_.for_maps(visit);
  }
  [[nodiscard]] bool by_rows() const override { return true; }

  void take_scratch(Bump& bump) override {
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

  /// Computes the experts' results for all rows.
  void begin(const Call& call, const T* /*in*/, const T* stream) override {
    const BlockWeights<T>& block = call.block;
    const std::size_t rows = shape_.rows;
    ops().norms->norm(block[router_norm_], stream, routed_, rows);
    ops().elementwise->scale(routed_, router_scale(), rows * width_);
    ops().products->multiply({rows, shape_.experts, width_}, matrix(routed_, width_),
                             transposed(block[router_].weight, width_),
                             matrix(logits_, shape_.step()));
    ops().routers->route(shape_, logits_, {}, nullptr, routing_, starts_);
    first_choices_ = ops().routers->fetch(starts_, shape_.experts + 1);
    ops().norms->norm(block[norm_before_], stream, normed_, rows);
    ops().elementwise->zero(sums_, rows * width_);
    by_chunks([&](std::size_t expert, const ExpertRows& chunk) {
      compute(block, expert, chunk);
      const Product p = forward_product(out_map(block, expert), scaled_, part_, width_,
                                        round_up(chunk.count, kRowStep));
      ops().products->multiply(p.extents, p.a, p.b, p.c);
      ops().experts->add_rows(chunk, part_, routing_.weights, sums_, width_);
    });
    round(sums_, results_);
  }
  void prepare(const Call& call, const T* x, const MapRows& rows) override {
    mlp_.prepare(call, x, rows);
  }
  void finish(const Call& call, const MapRows& rows, const Output<T>& y) override {
    mlp_.finish(call, rows, y);
  }
  /// Returns the sum of both, given the MLP's result in raw().
  T* result(const Call& call, const MapRows& rows) override {
    T* const both = both_ + rows.first * width_;
    ops().norms->norm(call.block[norm_after_], results_ + rows.first * width_, both, rows.count);
    ops().norms->norm(call.block[norm_after_mlp_], this->raw(call, rows), both, rows.count, both);
    return both;
  }
  /// Keeps the gradient of the experts' results for end_sublayer().
  void backward(const Call& call, const T* x, const MapRows& rows, const T* dout,
                const InputGradient<T>& dx) override {
    T* const results = results_ + rows.first * width_;
    T* const y = this->raw(call, rows);
    ops().norms->norm_backward(call.block[norm_after_], results, dout, nullptr, results,
                               rows.count);
    ops().norms->norm_backward(call.block[norm_after_mlp_], y, dout, nullptr, y, rows.count);
    mlp_.backward(call, x, rows, y, dx);
  }
  void end_sublayer(const Call& call, const T* stream, T* dstream) override {
    const BlockWeights<T>& block = call.block;
    const std::size_t rows = shape_.rows;
    ops().elementwise->zero(sums_, rows * width_);
    ops().elementwise->zero(routing_.weight_gradients, shape_.choices());
    by_chunks(
        [&](std::size_t expert, const ExpertRows& chunk) { differentiate(block, expert, chunk); });
    round(sums_, both_);
    ops().norms->norm_backward(block[norm_before_], stream, both_, dstream, dstream, rows);

    ops().routers->router_gradient(shape_, routing_, {}, {}, dlogits_);
    ops().products->linear_weight(block[router_], routed_, dlogits_, shape_.step(), rows);
    ops().products->linear_input(block[router_], dlogits_, shape_.step(), both_, rows);
    ops().elementwise->scale(both_, router_scale(), rows * width_);
    ops().norms->norm_backward(block[router_norm_], stream, both_, dstream, dstream, rows);
  }

 private:
  DeviceOps<T>& ops() const { return this->ops_; }
  static constexpr std::size_t kRows = 2048;  ///< rows of an expert at once
  /// Chunks are padded with zeros to a multiple of this many rows, so that products have few
  /// shapes.
  static constexpr std::size_t kRowStep = 16;

  [[nodiscard]] float router_scale() const {
    return static_cast<float>(1.0 / std::sqrt(static_cast<double>(width_)));
  }
  void round(const float* sums, T* to) {
    ops().packing->pack({.rest = sums}, to, shape_.rows * width_, statistics_, nullptr);
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
  [[nodiscard]] Linear<T> in_map(const BlockWeights<T>& block, std::size_t expert) const {
    return map_of(block, {.weight = in_ + expert * 2 * wide_ * width_,
                          .in = width_,
                          .out = 2 * wide_,
                          .flipped = true});
  }
  [[nodiscard]] Linear<T> out_map(const BlockWeights<T>& block, std::size_t expert) const {
    return map_of(
        block,
        {.weight = out_ + expert * wide_ * width_, .in = wide_, .out = width_, .flipped = true});
  }
  [[nodiscard]] GateUp<T> gate_up(std::size_t rows) const {
    return {hidden_, hidden_ + wide_, 2 * wide_, rows, wide_};
  }
  /// Computes the inputs of an expert's last map, without and with the expert's factor.
  void compute(const BlockWeights<T>& block, std::size_t expert, const ExpertRows& chunk) {
    const std::size_t rows = round_up(chunk.count, kRowStep);
    ops().experts->gather_rows(chunk, normed_, nullptr, x_, rows, width_);
    ops().products->linear(in_map(block, expert), x_, hidden_, 2 * wide_, rows);
    ops().elementwise->glu({Activation::gelu_tanh}, gate_up(rows), activated_);
    const std::size_t size = rows * wide_;
    ops().elementwise->copy_bytes(reinterpret_cast<const std::byte*>(activated_),
                                  reinterpret_cast<std::byte*>(scaled_), size * sizeof(T));
    ops().elementwise->scale_by(block.weights + factors_ + expert, 1, scaled_, size);
  }
  void differentiate(const BlockWeights<T>& block, std::size_t expert, const ExpertRows& chunk) {
    compute(block, expert, chunk);
    const std::size_t rows = round_up(chunk.count, kRowStep);
    const Linear<T> out = out_map(block, expert);
    ops().experts->gather_rows(chunk, results_, routing_.weights, dy_, rows, width_);
    ops().products->linear_weight(out, scaled_, dy_, width_, rows);
    ops().products->linear_input(out, dy_, width_, dactivated_, rows);
    ops().experts->dot_rows(chunk, scaled_, dactivated_, routing_.weights,
                            routing_.weight_gradients, wide_);
    add_factor_gradient(block, factors_ + expert, chunk.count);
    ops().elementwise->scale_by(block.weights + factors_ + expert, 1, dactivated_, rows * wide_);
    const Linear<T> in = in_map(block, expert);
    ops().elementwise->glu_backward({Activation::gelu_tanh}, gate_up(rows), dactivated_);
    ops().products->linear_weight(in, x_, hidden_, 2 * wide_, rows);
    ops().products->linear_input_part(in, hidden_, 2 * wide_, part_, rows);
    ops().experts->add_rows(chunk, part_, nullptr, sums_, width_);
  }
  /// Adds the sum of the products of activated values and gradients of scaled ones.
  void add_factor_gradient(const BlockWeights<T>& block, Elems factor, std::size_t rows) {
    float* const gradient = block[NormAt{.weight = factor}].weight_gradient;
    if (gradient == nullptr) return;
    ops().experts->dot_rows({nullptr, rows, 1}, activated_, dactivated_, nullptr, products_, wide_);
    ops().elementwise->add_sum(products_, rows, gradient);
  }

  MlpPart<T> mlp_;
  RouterShape shape_;
  std::size_t width_;
  std::size_t wide_;
  std::size_t chunk_;
  LinearAt router_;
  NormAt router_norm_;  ///< its weights are the router's scale
  Elems factors_;       ///< [count]
  Elems in_;            ///< [count, 2 width, H]
  Elems out_;           ///< [count, H, width]
  NormAt norm_before_;
  NormAt norm_after_;
  NormAt norm_after_mlp_;
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
