#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numbers>
#include <optional>

#include "ballast/core/dtype.h"

#include "src/model/compute/part.h"

namespace ballast::model {

/// A layer's inputs besides the residual stream (LayerEmbeddingSpec). The first layer projects the
/// inputs of all layers, which have `all_` columns per token.
template <class T>
class LayerEmbeddingPart final : public LayerPart<T> {
 public:
  using typename LayerPart<T>::Call;

  LayerEmbeddingPart(const LayerEmbeddingSpec& spec, std::uint64_t layer, const Binder& binder,
                     LayerTools<T>& tools)
      : LayerPart<T>(tools),
        width_(spec.width),
        all_(tools.layers * spec.width),
        column_(layer * spec.width),
        gate_(binder.map({spec.gate}, tools.hidden, width_)),
        out_(binder.map({spec.out}, width_, tools.hidden)) {
    how_.scale =
        to_float(from_float<T>(static_cast<float>(std::sqrt(static_cast<double>(width_)))));
    how_.factor = static_cast<float>(1.0 / std::numbers::sqrt2);
    if (layer > 0) return;
    projection_ = binder.map({spec.projection}, tools.hidden, all_);
    // The norm of map(e) / sqrt(H): its epsilon is multiplied by H instead.
    projection_norm_ =
        binder.norm({.name = spec.projection_norm,
                     .epsilon = tools.norm_epsilon * static_cast<double>(tools.hidden)});
  }

  void share(ArrayList& /*list*/, const LayerMoments& /*at*/, const SharedPlaces& /*places*/,
             std::size_t /*chunk*/) override {}
  void take_scratch(Bump& bump) override {
    const std::size_t chunk = this->tools_.mlp_rows;
    projected_ = bump.take<T>(this->tools_.rows() * all_);
    gated_ = bump.take<T>(chunk * width_);
    input_ = bump.take<T>(chunk * width_);
    activated_ = bump.take<T>(chunk * width_);
    result_ = bump.take<T>(chunk * this->tools_.hidden);
    stream_ = bump.take<T>(chunk * this->tools_.hidden);
  }
  void for_maps(const std::function<void(const LinearAt&, std::size_t)>& visit) const override {
    visit(gate_, this->tools_.mlp_rows);
    visit(out_, this->tools_.mlp_rows);
    if (projection_) visit(*projection_, this->tools_.rows());
  }
  [[nodiscard]] bool by_rows() const override { return true; }
  T* stream() override { return stream_; }
  T* raw(const Call& /*call*/, const MapRows& /*rows*/) override { return result_; }

  void begin(const Call& call, const T* in, const T* /*stream*/) override {
    if (!projection_ || call.backward || call.links.inputs == nullptr) return;
    this->maps_.linear(call.block, *projection_, in, projected_, all_, this->all());
    this->ops_.norms->norm_groups(call.block[projection_norm_], by_layer(), projected_, all_,
                                  call.links.inputs, all_);
  }
  void prepare(const Call& call, const T* x, const MapRows& rows) override {
    this->maps_.linear(call.block, gate_, x, gated_, width_, rows);
    this->ops_.links->mix_rows({call.links.table_rows + rows.first * width_, rows.count, width_},
                               how_, call.links.inputs + rows.first * all_ + column_, all_, input_);
    this->ops_.elementwise->glu({Activation::gelu_tanh}, pair(rows), activated_);
  }
  void finish(const Call& call, const MapRows& rows, const Output<T>& y) override {
    this->onto(call, out_, activated_, y, rows);
  }
  void backward(const Call& call, const T* x, const MapRows& rows, const T* dout,
                const InputGradient<T>& dx) override {
    this->weights_backward(call, out_, activated_, dout, this->tools_.hidden, rows);
    this->maps_.linear_input(call.block, out_, dout, this->tools_.hidden, activated_, rows);
    this->ops_.elementwise->glu_backward({Activation::gelu_tanh}, pair(rows), activated_);
    T* const inputs = call.links.inputs_gradient;
    float* const table = call.links.table_rows_gradient;
    this->ops_.links->mix_rows_backward(
        {input_, rows.count, width_}, how_,
        table == nullptr ? nullptr : table + rows.first * width_,
        inputs == nullptr ? nullptr : inputs + rows.first * all_ + column_, all_);
    this->weights_backward(call, gate_, x, gated_, width_, rows);
    this->input_backward(call, gate_, gated_, width_, dx, rows);
  }
  void end_layer(const Call& call, const T* in, T* din) override {
    T* const inputs = call.links.inputs_gradient;
    if (!projection_ || inputs == nullptr) return;
    const LinearAt& map = *projection_;
    this->maps_.linear(call.block, map, in, projected_, all_, this->all());
    this->ops_.norms->norm_groups_backward(call.block[projection_norm_], by_layer(), projected_,
                                           all_, inputs, all_);
    this->weights_backward(call, map, in, inputs, all_, this->all());
    this->maps_.linear_input(call.block, map, inputs, all_, din, this->all(), true);
  }

 private:
  [[nodiscard]] Groups by_layer() const { return {this->tools_.rows(), all_ / width_, width_}; }
  [[nodiscard]] GateUp<T> pair(const MapRows& rows) const {
    return {gated_, input_, width_, rows.count, width_};
  }

  std::size_t width_;
  std::size_t all_;     ///< columns of the inputs of all layers
  std::size_t column_;  ///< first column of this layer
  TokenMix how_;
  LinearAt gate_;
  LinearAt out_;
  std::optional<LinearAt> projection_;  ///< in the first layer
  NormAt projection_norm_;
  T* projected_ = nullptr;  ///< [N, all_] before its norm
  T* gated_ = nullptr;      ///< [chunk, width] before the activation, later its gradient
  T* input_ = nullptr;      ///< [chunk, width], later its gradient
  T* activated_ = nullptr;  ///< [chunk, width], later its gradient
  T* result_ = nullptr;     ///< [chunk, H], later its gradient
  T* stream_ = nullptr;     ///< [chunk, H]
};

}  // namespace ballast::model
