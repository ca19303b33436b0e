#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "ballast/core/memory.h"

#include "src/model/compute/kernel_arguments.h"
#include "src/model/compute/part.h"

namespace ballast::model {

/// A gated delta net (DeltaSpec). A row of its inputs is described by DeltaShape.
template <class T>
class DeltaPart final : public LayerPart<T> {
 public:
  using typename LayerPart<T>::Call;

  DeltaPart(const DeltaSpec& spec, const Binder& binder, LayerTools<T>& tools)
      : LayerPart<T>(tools),
        shape_({.sequences = tools.shape.sequences,
                .length = tools.shape.length,
                .key_heads = spec.key_heads,
                .value_heads = spec.value_heads,
                .key_width = spec.key_width,
                .value_width = spec.value_width,
                .taps = spec.taps,
                .beta_factor = static_cast<float>(spec.beta_factor)}),
        by_key_head_(spec.by_key_head),
        shift_(binder.offset(spec.shift)),
        decay_(binder.offset(spec.decay)),
        out_(binder.map(spec.out, spec.values(), tools.hidden)) {
    std::vector<std::size_t> outputs = {shape_.channels(), shape_.values(), shape_.value_heads,
                                        shape_.value_heads};
    if (by_key_head_) outputs = {shape_.betas_at(), 2 * shape_.value_heads};
    if (spec.maps.size() == 6) {
      outputs.erase(outputs.begin());
      outputs.insert(outputs.begin(), {shape_.keys(), shape_.keys(), shape_.values()});
    }
    for (std::size_t i = 0; i < spec.maps.size(); ++i) {
      const auto ranges = binder.ranges(spec.maps[i], tools.hidden, outputs.at(i));
      inputs_.insert(inputs_.end(), ranges.begin(), ranges.end());
    }
    inputs_ = joined(inputs_);
    number_adapters(inputs_);
    norm_.epsilon = static_cast<float>(spec.norm.epsilon);
    if (!binder.is_tile()) norm_ = binder.norm(spec.norm);
    if (binder.block() == nullptr) return;
    for (const std::string& name : spec.convolution) {
      const std::string& convolution = binder.block()->tensor(name + ".weight").name;
      for (const TensorSpec& tensor : binder.block()->tensors) {
        if (tensor.name != convolution) continue;
        convolution_.push_back({tensor.offset, tensor.offset + tensor.size});
      }
    }
  }

  void arrays(ArrayList& list, const LayerMoments& at) override {
    using M = LayerMoments;
    mixed_ = list.own("inputs of a delta net", this->by_token(shape_.row()),
                      {at.at(M::maps), at.at(M::d_shape)});
    channels_ = list.own("channels", this->by_token(shape_.channels()),
                         {at.at(M::shape), at.at(M::d_core)});
    const ArrayLife results = {at.at(M::core), at.at(M::d_core)};
    recurred_ =
        list.own("results of the recurrence", this->by_token(shape_.values()), results, true);
    states_ = list.own("states", shape_.states() * sizeof(float), results, true);
  }
  void share(ArrayList& list, const LayerMoments& at, const SharedPlaces& places,
             std::size_t /*chunk*/) override {
    using M = LayerMoments;
    dresults_ = list.add(places.turn, "gradient of results", this->by_token(shape_.values()),
                         {{at.at(M::d_out), at.at(M::d_core)}});
    formed_ = list.add(places.work, "normed results", this->by_token(shape_.values()),
                       {{at.at(M::core), at.at(M::out)}, {at.at(M::d_out), at.at(M::d_out)}});
    dmixed_ = list.add(places.work, "gradient of the inputs of a delta net",
                       this->by_token(shape_.row()), {{at.at(M::d_core), at.at(M::d_maps)}});
    // Rows in the order of the maps wait there while they are rearranged.
    if (by_key_head_) {
      list.add(places.work, "inputs by heads of keys", this->by_token(shape_.row()),
               {{at.at(M::maps), at.at(M::maps)}});
    }
  }
  void for_maps(const std::function<void(const LinearAt&, std::size_t)>& visit) const override {
    for (const LinearAt& map : inputs_) visit(map, this->tools_.rows());
    visit(out_, this->tools_.rows());
  }

  void prepare(const Call& call, const T* x, const MapRows& rows) override {
    project(call, x, rows);
    auto& mixers = *this->ops_.mixers;
    mixers.convolve(convolution(call), call.at(mixed_), call.at(channels_), scratch());
    if (call.knows()) return;
    mixers.recur(inputs(call), call.at(recurred_), call.template at<float>(states_), scratch());
  }
  void finish(const Call& call, const MapRows& rows, const Output<T>& y) override {
    this->onto(call, out_, results(call), y, rows);
  }
  void backward(const Call& call, const T* x, const MapRows& rows, const T* dout,
                const InputGradient<T>& dx) override {
    const std::size_t width = this->tools_.hidden;
    this->bias_backward(call, out_, dout, width, rows);
    this->maps_.linear_weight(call.block, out_, results(call), dout, width, rows);
    T* const dresults = call.at(dresults_);
    this->maps_.linear_input(call.block, out_, dout, width, dresults, rows);

    T* const mixed = call.at(mixed_);
    T* const d = call.at(dmixed_);
    const std::size_t row = shape_.row();
    auto& mixers = *this->ops_.mixers;
    mixers.gated_norm_backward(call.head_norms[norm_], call.at(recurred_), gates(mixed), dresults,
                               gates(d), scratch());
    mixers.recur_backward(inputs(call), call.template at<float>(states_), dresults,
                          {d, d + shape_.betas_at(), row, vector(call, decay_).weight_gradient,
                           vector(call, shift_).weight_gradient},
                          scratch());
    convolve_backward(call, mixed, d);
    const T* first = d;
    if (by_key_head_) {
      for_groups(mixed, d,
                 [&](const Groups& heads, T* by_head, const GroupSteps& by_head_steps, T* apart,
                     const GroupSteps& apart_steps) {
                   this->ops_.heads->copy_groups(heads, apart, apart_steps, by_head, by_head_steps);
                 });
      first = mixed;
    }
    const T* from = first;
    for (const LinearAt& map : inputs_) {
      this->weights_backward(call, map, x, from, row, rows);
      this->input_backward(call, map, from, row, dx, rows, from != first);
      from += map.out;
    }
  }

 private:
  void project(const Call& call, const T* x, const MapRows& rows) {
    T* const first = call.at(by_key_head_ ? dmixed_ : mixed_);
    T* to = first;
    for (const LinearAt& map : inputs_) {
      this->maps_.linear(call.block, map, x, to, shape_.row(), rows);
      to += map.out;
    }
    if (!by_key_head_) return;
    for_groups(first, call.at(mixed_),
               [&](const Groups& heads, T* by_head, const GroupSteps& by_head_steps, T* apart,
                   const GroupSteps& apart_steps) {
                 this->ops_.heads->copy_groups(heads, by_head, by_head_steps, apart, apart_steps);
               });
  }
  /// Calls copy(heads, place in `by_head` and its steps, place in `apart` and its steps) for
  /// queries, keys, values, gates, `b` and `a`. Both are rows of DeltaShape, `by_head` in the order
  /// of DeltaSpec::by_key_head.
  template <class Copy>
  void for_groups(T* by_head, T* apart, const Copy& copy) const {
    const std::size_t heads = shape_.key_heads;
    const std::size_t shared = shape_.value_heads / heads;
    const std::size_t values = shared * shape_.value_width;
    const std::array<std::size_t, 6> widths = {shape_.key_width, shape_.key_width, values,
                                               values,           shared,           shared};
    std::size_t before = 0;
    std::size_t column = 0;
    for (std::size_t i = 0; i < widths.size(); ++i) {
      const bool first_map = i < 4;
      const std::size_t group = first_map ? 2 * shape_.key_width + 2 * values : 2 * shared;
      if (i == 4) before = shape_.betas_at();
      const std::size_t wide = widths.at(i);
      copy({shape_.tokens(), heads, wide}, by_head + before, {shape_.row(), group}, apart + column,
           {shape_.row(), wide});
      before += wide;
      column += heads * wide;
    }
  }
  /// Returns the input of the last map [N, values()].
  const T* results(const Call& call) {
    this->ops_.mixers->gated_norm(call.head_norms[norm_], call.at(recurred_),
                                  gates(call.at(mixed_)), call.at(formed_));
    return call.at(formed_);
  }
  static Norm<T> vector(const Call& call, Elems offset) {
    return call.block[NormAt{.weight = offset}];
  }
  /// Copies weights in several ranges to one array.
  Convolution<T> convolution(const Call& call) {
    const std::int32_t* const positions = call.sequences.documents;
    const Norm<T> first = vector(call, convolution_.front().first);
    const ConvolutionShape shape = shape_.convolution();
    if (convolution_.size() == 1) return {first.weight, first.weight_gradient, positions, shape};
    T* to = this->tools_.taps;
    for (const ElementRange& range : convolution_) {
      this->ops_.elementwise->copy_bytes(
          reinterpret_cast<const std::byte*>(vector(call, range.first).weight),
          reinterpret_cast<std::byte*>(to), range.count() * sizeof(T));
      to += range.count();
    }
    return {this->tools_.taps,
            first.weight_gradient == nullptr ? nullptr : this->tools_.taps_gradient, positions,
            shape};
  }
  /// Replaces `d` by the gradient of the channels `x`.
  void convolve_backward(const Call& call, const T* x, T* d) {
    const Convolution<T> how = convolution(call);
    const bool joins =
        how.weight_gradient != nullptr && how.weight_gradient == this->tools_.taps_gradient;
    if (joins)
      this->ops_.elementwise->zero(this->tools_.taps_gradient, shape_.channels() * shape_.taps);
    this->ops_.mixers->convolve_backward(how, x, d, scratch());
    if (!joins) return;
    const float* from = this->tools_.taps_gradient;
    for (const ElementRange& range : convolution_) {
      this->ops_.elementwise->accumulate(from, vector(call, range.first).weight_gradient,
                                         range.count());
      from += range.count();
    }
  }
  DeltaInputs<T> inputs(const Call& call) const {
    return {
        call.at(channels_),          call.at(mixed_) + shape_.betas_at(), shape_.row(),
        vector(call, decay_).weight, vector(call, shift_).weight,         call.sequences.documents};
  }
  T* gates(T* row) const { return row + shape_.gates_at(); }
  [[nodiscard]] std::byte* scratch() const { return this->tools_.mixer_scratch; }

  DeltaShape shape_;
  bool by_key_head_;
  std::vector<LinearAt> inputs_;
  /// One range, or three: channels of queries, keys and values.
  std::vector<ElementRange> convolution_;
  Elems shift_;
  Elems decay_;
  NormAt norm_;
  LinearAt out_;
  ArrayList::Id mixed_ = 0;     ///< [N, row()]
  ArrayList::Id channels_ = 0;  ///< [N, channels()] after the convolution
  ArrayList::Id recurred_ = 0;  ///< [N, values()]
  ArrayList::Id states_ = 0;
  ArrayList::Id dresults_ = 0;  ///< [N, values()]
  ArrayList::Id formed_ = 0;    ///< [N, values()]
  ArrayList::Id dmixed_ = 0;    ///< like mixed
};

}  // namespace ballast::model
