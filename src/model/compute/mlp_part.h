#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "src/model/compute/part.h"

namespace ballast::model {

/// An MLP. Gate and up are side by side in each row if one product makes both, else consecutive
/// arrays.
template <class T>
class MlpPart final : public LayerPart<T> {
 public:
  using typename LayerPart<T>::Call;

  MlpPart(const MlpSpec& spec, const Binder& binder, LayerTools<T>& tools)
      : LayerPart<T>(tools),
        gated_(spec.gated),
        gating_{spec.activation, spec.limit, spec.slope},
        most_(spec.width),
        out_(binder.map(spec.out, spec.width, tools.hidden)),
        width_(out_.in) {
    const std::size_t width = spec.gated && spec.in.size() == 1 ? 2 * spec.width : spec.width;
    for (const MapSpec& map : spec.in) {
      for (const LinearAt& range : binder.ranges(map, tools.hidden, width)) in_.push_back(range);
    }
    if (tools.ops.traits.mlp.joins_gate_and_up) in_ = joined(in_);
    number_adapters(in_);
  }

  void share(ArrayList& list, const LayerMoments& at, const SharedPlaces& places,
             std::size_t chunk) override {
    hidden_ = list.add(places.work, "hidden and activated",
                       chunk * arrays_per_value() * most_ * sizeof(T),
                       {{at.at(LayerMoments::maps), at.at(LayerMoments::d_maps)}});
  }
  void for_maps(const std::function<void(const LinearAt&, std::size_t)>& visit) const override {
    for (const LinearAt& map : in_) visit(map, this->tools_.mlp_rows);
    visit(out_, this->tools_.mlp_rows);
  }
  [[nodiscard]] bool by_rows() const override { return true; }

  void prepare(const Call& call, const T* x, const MapRows& rows) override {
    T* const activated = activated_of(call, rows);
    if (!gated_) {
      T* const hidden = hidden_of(call, rows);
      this->maps_.linear(call.block, in_.front(), x, hidden, width_, rows);
      return this->ops_.elementwise->activate(gating_.activation, hidden, activated,
                                              rows.count * width_);
    }
    const GateUp<T> pair = gate_up(call, rows);
    T* to = pair.gate;
    for (const LinearAt& map : in_) {
      this->maps_.linear(call.block, map, x, to, pair.step, rows);
      to = pair.up;
    }
    this->ops_.elementwise->glu(gating_, pair, activated);
  }
  void finish(const Call& call, const MapRows& rows, const Output<T>& y) override {
    this->onto(call, out_, activated_of(call, rows), y, rows);
  }
  void backward(const Call& call, const T* x, const MapRows& rows, const T* dout,
                const InputGradient<T>& dx) override {
    const std::size_t width = this->tools_.hidden;
    T* const activated = activated_of(call, rows);
    this->weights_backward(call, out_, activated, dout, width, rows);
    this->maps_.linear_input(call.block, out_, dout, width, activated, rows);
    if (!gated_) {
      const LinearAt& map = in_.front();
      this->ops_.elementwise->activate_backward(gating_.activation, hidden_of(call, rows),
                                                activated, call.block[map].bias_gradient,
                                                rows.count, width_);
      this->maps_.linear_weight(call.block, map, x, activated, width_, rows);
      return this->input_backward(call, map, activated, width_, dx, rows);
    }
    const GateUp<T> pair = gate_up(call, rows);
    this->ops_.elementwise->glu_backward(gating_, pair, activated);
    const T* from = pair.gate;
    for (const LinearAt& map : in_) {
      this->weights_backward(call, map, x, from, pair.step, rows);
      from = pair.up;
    }
    from = pair.gate;
    for (const LinearAt& map : in_) {
      this->input_backward(call, map, from, pair.step, dx, rows, from != pair.gate);
      from = pair.up;
    }
  }

 private:
  /// Arrays [rows, width] for hidden and activated together.
  [[nodiscard]] std::size_t arrays_per_value() const { return gated_ ? 3 : 2; }
  T* hidden_of(const Call& call, const MapRows& rows) const {
    return call.at(hidden_) + (call.kept ? rows.first : 0) * arrays_per_value() * width_;
  }
  T* activated_of(const Call& call, const MapRows& rows) const {
    return hidden_of(call, rows) + (arrays_per_value() - 1) * rows.count * width_;
  }
  [[nodiscard]] GateUp<T> gate_up(const Call& call, const MapRows& rows) const {
    T* const gate = hidden_of(call, rows);
    const bool joint = in_.size() == 1;
    return {gate, gate + (joint ? width_ : rows.count * width_), joint ? 2 * width_ : width_,
            rows.count, width_};
  }

  bool gated_;
  Gating gating_;
  std::size_t most_;  ///< width of the widest tile
  std::vector<LinearAt> in_;
  LinearAt out_;
  std::size_t width_;
  ArrayList::Id hidden_ = 0;
};

}  // namespace ballast::model
