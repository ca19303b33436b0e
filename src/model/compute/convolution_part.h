#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "src/model/compute/part.h"

namespace ballast::model {

/// A gated short convolution (ConvolutionSpec).
template <class T>
class ConvolutionPart final : public LayerPart<T> {
 public:
  using typename LayerPart<T>::Call;

  ConvolutionPart(const ConvolutionSpec& spec, const Binder& binder, LayerTools<T>& tools)
      : LayerPart<T>(tools),
        shape_({.sequences = tools.shape.sequences,
                .length = tools.shape.length,
                .channels = spec.channels,
                .taps = spec.taps,
                .x_step = 3 * spec.channels,
                .biased = spec.bias}),
        in_(joined(binder.ranges(spec.in, tools.hidden, shape_.x_step))),
        weights_(binder.norm({.name = spec.convolution})),
        out_(binder.map(spec.out, spec.channels, tools.hidden)) {
    number_adapters(in_);
  }

  void arrays(ArrayList& list, const LayerMoments& at) override {
    using M = LayerMoments;
    mixed_ = list.own("inputs of a convolution", this->by_token(shape_.x_step),
                      {at.at(M::maps), at.at(M::d_core)});
  }
  void share(ArrayList& list, const LayerMoments& at, const SharedPlaces& places,
             std::size_t /*chunk*/) override {
    using M = LayerMoments;
    dresults_ = list.add(places.turn, "gradient of a convolution", this->by_token(shape_.channels),
                         {{at.at(M::d_out), at.at(M::d_core)}});
    results_ = list.add(places.work, "results of a convolution", this->by_token(shape_.channels),
                        {{at.at(M::core), at.at(M::out)}, {at.at(M::d_out), at.at(M::d_out)}});
    dmixed_ = list.add(places.work, "gradient of the inputs of a convolution",
                       this->by_token(shape_.x_step), {{at.at(M::d_core), at.at(M::d_maps)}});
  }
  void take_scratch(Bump& bump) override {
    scratch_ = bump.take<std::byte>(this->ops_.mixers->convolution_scratch_bytes(shape_));
  }
  void for_maps(const std::function<void(const LinearAt&, std::size_t)>& visit) const override {
    for (const LinearAt& map : in_) visit(map, this->tools_.rows());
    visit(out_, this->tools_.rows());
  }

  void prepare(const Call& call, const T* x, const MapRows& rows) override {
    T* to = call.at(mixed_);
    for (const LinearAt& map : in_) {
      this->maps_.linear(call.block, map, x, to, shape_.x_step, rows);
      to += map.out;
    }
  }
  void finish(const Call& call, const MapRows& rows, const Output<T>& y) override {
    this->onto(call, out_, results(call), y, rows);
  }
  void backward(const Call& call, const T* x, const MapRows& rows, const T* dout,
                const InputGradient<T>& dx) override {
    const std::size_t width = this->tools_.hidden;
    this->weights_backward(call, out_, results(call), dout, width, rows);
    T* const dresults = call.at(dresults_);
    this->maps_.linear_input(call.block, out_, dout, width, dresults, rows);
    T* const first = call.at(dmixed_);
    this->ops_.mixers->gated_convolve_backward(convolution(call), call.at(mixed_), dresults, first,
                                               scratch_);
    const T* from = first;
    for (const LinearAt& map : in_) {
      this->weights_backward(call, map, x, from, shape_.x_step, rows);
      this->input_backward(call, map, from, shape_.x_step, dx, rows, from != first);
      from += map.out;
    }
  }

 private:
  /// Returns the input of the last map [N, channels].
  const T* results(const Call& call) {
    this->ops_.mixers->gated_convolve(convolution(call), call.at(mixed_), call.at(results_),
                                      scratch_);
    return call.at(results_);
  }
  Convolution<T> convolution(const Call& call) const {
    const Norm<T> own = call.block[weights_];
    return {own.weight, own.weight_gradient, call.sequences.documents, shape_,
            own.bias,   own.bias_gradient};
  }

  ConvolutionShape shape_;
  std::vector<LinearAt> in_;
  NormAt weights_;  ///< places of the weights and of the biases
  LinearAt out_;
  std::byte* scratch_ = nullptr;
  ArrayList::Id mixed_ = 0;     ///< [N, 3 x channels]
  ArrayList::Id results_ = 0;   ///< [N, channels]
  ArrayList::Id dresults_ = 0;  ///< [N, channels]
  ArrayList::Id dmixed_ = 0;    ///< like mixed
};

}  // namespace ballast::model
