#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "ballast/core/error.h"

#include "src/model/compute/latent_maps.h"
#include "src/model/compute/part.h"

namespace ballast::model {

/// Attention (AttentionSpec). If ranks share sequences, queries, keys and values are exchanged for
/// whole sequences of the rank's heads.
template <class T>
class AttentionPart final : public LayerPart<T> {
 public:
  using typename LayerPart<T>::Call;

  AttentionPart(const AttentionSpec& spec, const KeySharing& sharing, const Binder& binder,
                LayerTools<T>& tools)
      : LayerPart<T>(tools),
        shape_(tools.of(spec)),
        window_(spec.window),
        sharing_(sharing),
        out_(binder.map(spec.out, spec.heads.heads * spec.value_width(), tools.hidden)) {
    if (!spec.sinks.empty()) sinks_ = binder.offset(spec.sinks);
    if (spec.rotary) rotary_ = {spec.rotary->keys, spec.rotary->queries, spec.rotary->growth};
    rotates_ = spec.rotary.has_value();
    rotary_.without_keys = sharing.reads;
    if (const auto* const latent = std::get_if<LatentMaps>(&spec.maps)) {
      latent_.emplace(*latent, shape_, binder, tools);
      rotary_.plain = latent->plain;
      return;
    }
    bind(std::get<HeadMaps>(spec.maps), binder);
  }

  void arrays(ArrayList& list, const LayerMoments& at) override {
    using M = LayerMoments;
    if (query_norm_) {
      projected_ = list.own("queries and keys before their norms", this->by_token(projected_row()),
                            {at.at(M::maps), at.at(M::d_maps)});
    }
    if (latent_) latent_->arrays(list, at);
    qkv_ = list.own("queries, keys and values", this->by_token(shape_.row()),
                    {at.at(M::shape), at.at(M::d_core)});
    const ArrayLife results = {at.at(M::core), at.at(M::d_core)};
    attention_ = list.own("results of attention", this->by_token(shape_.width()), results, true);
    if (exchanges()) {
      attended_ =
          list.own("results of attention by heads", this->by_token(shape_.width()), results, true);
    }
    log_sums_ = list.own("log-sums", shape_.log_sums() * sizeof(float), results, true);
  }
  void share(ArrayList& list, const LayerMoments& at, const SharedPlaces& places,
             std::size_t /*chunk*/) override {
    using M = LayerMoments;
    dresults_ = list.add(places.turn, "gradient of the results of attention",
                         this->by_token(shape_.width()), {{at.at(M::d_out), at.at(M::d_core)}});
    if (latent_) latent_->share(list, at, places);
    if (output_gate_ || padding() > 0) {
      formed_ = list.add(places.work, "gated or packed results", this->by_token(shape_.width()),
                         {{at.at(M::core), at.at(M::out)}, {at.at(M::d_out), at.at(M::d_out)}});
    }
    dqkv_ = list.add(places.work, "gradient of queries, keys and values",
                     this->by_token(shape_.row()), {{at.at(M::d_core), at.at(M::d_maps)}});
  }
  void for_maps(const std::function<void(const LinearAt&, std::size_t)>& visit) const override {
    for (const LinearAt& map : inputs_) visit(map, this->tools_.rows());
    if (latent_) latent_->for_maps(visit);
    visit(out_, this->tools_.rows());
  }

  void prepare(const Call& call, const T* x, const MapRows& rows) override {
    T* const qkv = call.at(qkv_);
    if (latent_) {
      latent_->project(call, x, qkv);
    } else {
      project(call, x, rows, qkv);
    }
    if (rotates_ && !rotates_first_) rotate(call, qkv, 1.0F);
    share_keys(call, qkv + shape_.width());
    auto& exchange = this->tools_.exchange;
    if (exchanges()) exchange.to_heads(exchange.projections(), qkv, qkv);
    if (call.knows()) return;
    T* const results = results_by_heads(call);
    this->ops_.attention->attention(mask(call), exchange.own(call.block.sinks(sinks_)), qkv,
                                    results, call.template at<float>(log_sums_),
                                    this->tools_.attention_scratch);
    if (exchanges()) exchange.to_rows(exchange.results(), results, call.at(attention_));
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
    T* const packed = padding() > 0 ? call.at(formed_) : dresults;
    this->maps_.linear_input(call.block, out_, dout, width, packed, rows);
    if (padding() > 0) {
      this->ops_.heads->copy_groups(heads(values()), packed, in_packed(), dresults, in_results(),
                                    padding());
    }
    if (output_gate_) {
      this->ops_.mixers->output_gate_backward(call.at(attention_), gates(call), projected_row(),
                                              dresults, shape_.tokens(), shape_.width());
    }
    T* const dqkv = call.at(dqkv_);
    attend_backward(call, dresults, dqkv);
    share_gradients(call, dqkv + shape_.width());
    if (rotates_ && !rotates_first_) rotate(call, dqkv, -1.0F);
    if (latent_) return latent_->backward(call, x, dqkv, dx);
    norms_backward(call, dqkv);
    if (rotates_ && rotates_first_) rotate(call, dqkv, -1.0F);
    maps_backward(call, x, rows, dqkv, dx);
  }

 private:
  void bind(const HeadMaps& maps, const Binder& binder) {
    const std::size_t hidden = this->tools_.hidden;
    const std::size_t queries = shape_.width();
    const std::size_t keys = shape_.kv_width();
    separate_gate_ = !maps.gate.name.empty();
    output_gate_ = maps.output_gate || separate_gate_;
    expects(!output_gate_ || maps.query_norm, "gates need norms of queries and keys");
    for (std::size_t i = 0; i < maps.maps.size(); ++i) {
      std::size_t out = i > 0 ? keys : maps.output_gate ? 2 * queries : queries;
      if (maps.maps.size() == 1 && !sharing_.reads) out = shape_.row();
      const auto ranges = binder.ranges(maps.maps[i], hidden, out);
      inputs_.insert(inputs_.end(), ranges.begin(), ranges.end());
      if (i == 0 && separate_gate_) inputs_.push_back(binder.map(maps.gate, hidden, queries));
    }
    whole_rows_ = maps.whole_rows;
    rotates_first_ = maps.rotates_first;
    norms_values_ = maps.value_norm.has_value();
    keys_are_values_ = maps.maps.size() == 2;
    if (maps.query_norm) {
      expects(maps.maps.size() == 3 || keys_are_values_ || sharing_.reads,
              "queries and keys with norms need separate maps");
      expects(!keys_are_values_ || norms_values_, "values that are keys need norms");
      expects(!rotates_first_ || (!output_gate_ && !norms_values_),
              "rows that rotate before norms have only queries and keys");
      query_norm_ = norm_of_heads(*maps.query_norm, 0, binder);
      if (maps.key_norm) {
        key_norm_ = norm_of_heads(*maps.key_norm, this->tools_.head_norms.keys(), binder);
      }
    } else {
      inputs_ = joined(inputs_);
    }
    number_adapters(inputs_);
  }
  /// In a tile: offsets in the weights of HeadNorms.
  static NormAt norm_of_heads(const NormSpec& spec, std::size_t place, const Binder& binder) {
    if (binder.is_tile()) return {.weight = place, .offset = spec.offset};
    return binder.norm(spec);
  }

  [[nodiscard]] bool exchanges() const { return this->tools_.exchange.is_needed(); }
  [[nodiscard]] AttentionMask mask(const Call& call) const {
    return {window_, call.sequences.documents};
  }
  T* results_by_heads(const Call& call) const {
    return call.at(exchanges() ? attended_ : attention_);
  }
  /// Columns of queries, perhaps gates, keys and perhaps values before their norms.
  [[nodiscard]] std::size_t projected_columns() const {
    return projected_keys() + (norms_values_ ? 2 : 1) * shape_.kv_width();
  }
  /// Rows that rotate are as long as those of queries, keys and values.
  [[nodiscard]] std::size_t projected_row() const {
    return rotates_first_ ? shape_.row() : projected_columns();
  }
  [[nodiscard]] std::size_t projected_keys() const {
    return (output_gate_ ? 2 : 1) * shape_.width();
  }
  [[nodiscard]] std::size_t projected_values() const {
    return shape_.width() + (keys_are_values_ ? 0 : shape_.kv_width());
  }
  T* gates(const Call& call) const { return call.at(projected_) + shape_.width(); }
  [[nodiscard]] Groups normed(std::size_t count) const {
    if (whole_rows_) return {shape_.tokens(), 1, count * shape_.head_dim};
    return {shape_.tokens(), count, shape_.head_dim};
  }
  [[nodiscard]] Groups heads(std::size_t width) const {
    return {shape_.tokens(), shape_.heads, width};
  }

  void project(const Call& call, const T* x, const MapRows& rows, T* qkv) {
    T* const projected = query_norm_ ? call.at(projected_) : nullptr;
    std::size_t column = 0;
    for (const LinearAt& map : inputs_) {
      const bool has_norm = query_norm_ && column < projected_columns();
      const std::size_t before = has_norm ? 0 : projected_keys() - shape_.width();
      this->maps_.linear(call.block, map, x, (has_norm ? projected : qkv) + column - before,
                         has_norm ? projected_row() : shape_.row(), rows);
      column += map.out;
    }
    if (!query_norm_) return;
    if (rotates_ && rotates_first_) rotate(call, projected, 1.0F);
    const std::size_t row = shape_.row();
    T* const keys = qkv + shape_.width();
    auto& ops = this->ops_;
    ops.norms->norm_groups(norm(call, *query_norm_), normed(shape_.heads), projected,
                           projected_row(), qkv, row);
    if (!key_norm_) return;
    ops.norms->norm_groups(norm(call, *key_norm_), normed(shape_.kv_heads),
                           projected + projected_keys(), projected_row(), keys, row);
    if (!norms_values_) return;
    ops.norms->norm_groups(this->tools_.unit_norm.norm(), normed(shape_.kv_heads),
                           projected + projected_values(), projected_row(),
                           keys + shape_.kv_width(), row);
  }
  Norm<T> norm(const Call& call, const NormAt& at) {
    return this->tools_.norm(call.head_norms, at);
  }
  /// Turns gradients of queries, keys and values into those before their norms.
  void norms_backward(const Call& call, T* dqkv) {
    if (!query_norm_) return;
    const T* const projected = call.at(projected_);
    const std::size_t row = shape_.row();
    T* const dkeys = dqkv + shape_.width();
    auto& ops = this->ops_;
    ops.norms->norm_groups_backward(norm(call, *query_norm_), normed(shape_.heads), projected,
                                    projected_row(), dqkv, row);
    if (!key_norm_) return;
    ops.norms->norm_groups_backward(norm(call, *key_norm_), normed(shape_.kv_heads),
                                    projected + projected_keys(), projected_row(), dkeys, row);
    if (!norms_values_) return;
    ops.norms->norm_groups_backward(this->tools_.unit_norm.norm(), normed(shape_.kv_heads),
                                    projected + projected_values(), projected_row(),
                                    dkeys + shape_.kv_width(), row);
    if (!keys_are_values_) return;
    ops.heads->sum_groups({shape_.tokens(), 2, shape_.kv_width()}, dkeys, {row, shape_.kv_width()},
                          dkeys, row);
  }
  void maps_backward(const Call& call, const T* x, const MapRows& rows, T* dqkv,
                     const InputGradient<T>& dx) {
    const T* from = dqkv;
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      const LinearAt& map = inputs_[i];
      const bool gates_alone = separate_gate_ && i == 1;
      const bool with_queries = output_gate_ && !separate_gate_ && i == 0;
      const T* d = from;
      if (gates_alone) d = gates(call);
      if (with_queries) d = with_gates(call, dqkv);
      const std::size_t step = gates_alone || with_queries ? projected_row() : shape_.row();
      this->weights_backward(call, map, x, d, step, rows);
      this->input_backward(call, map, d, step, dx, rows, i > 0);
      if (!gates_alone) from += with_queries ? shape_.width() : map.out;
    }
  }
  /// Copies the gradients of queries next to those of the gates, and returns both.
  const T* with_gates(const Call& call, const T* dqkv) {
    T* const both = call.at(projected_);
    this->ops_.heads->copy_groups({shape_.tokens(), 1, shape_.width()}, dqkv, {shape_.row(), 0},
                                  both, {projected_row(), 0});
    return both;
  }

  /// Rotates queries and keys by their positions; `direction` -1 rotates back.
  void rotate(const Call& call, T* qkv, float direction) {
    this->tools_.rotation.rotate(shape_, rotary_, qkv, call.sequences.positions, direction);
  }
  void share_keys(const Call& call, T* own) {
    const std::size_t width = 2 * shape_.kv_width();
    const Groups columns = {shape_.tokens(), 1, width};
    if (sharing_.reads) {
      this->ops_.heads->copy_groups(columns, call.links.keys_values, {width, 0}, own,
                                    {shape_.row(), 0});
    } else if (sharing_.gives && !call.backward) {
      this->ops_.heads->copy_groups(columns, own, {shape_.row(), 0}, call.links.keys_values,
                                    {width, 0});
    }
  }
  /// Adds gradients to the sums of all readers, or the sums to them.
  void share_gradients(const Call& call, T* own) {
    float* const sums = call.links.keys_values_gradient;
    if (sums == nullptr) return;
    const std::size_t width = 2 * shape_.kv_width();
    if (sharing_.reads) {
      this->ops_.links->sum_columns(own, shape_.row(), shape_.tokens(), width, !sharing_.last,
                                    sums);
    } else if (sharing_.gives) {
      this->ops_.links->add_sums(sums, shape_.tokens(), width, own, shape_.row());
    }
  }
  void attend_backward(const Call& call, T* dresults, T* dqkv) {
    auto& exchange = this->tools_.exchange;
    if (exchanges()) exchange.to_heads(exchange.results(), dresults, dresults);
    this->ops_.attention->attention_backward(
        mask(call), exchange.own(call.block.sinks(sinks_)), call.at(qkv_), results_by_heads(call),
        call.template at<float>(log_sums_), dresults, dqkv, this->tools_.attention_scratch);
    if (exchanges()) exchange.to_rows(exchange.projections(), dqkv, dqkv);
  }

  // Heads of values may be narrower than those of keys. Matrices have one width of heads, so values
  // are padded with zeros, and so are their results (AttentionShape::value_dim).
  [[nodiscard]] std::size_t values() const { return latent_ ? latent_->values() : shape_.head_dim; }
  [[nodiscard]] std::size_t padding() const { return shape_.head_dim - values(); }
  [[nodiscard]] GroupSteps in_results() const { return {shape_.width(), shape_.head_dim}; }
  [[nodiscard]] GroupSteps in_packed() const { return {shape_.heads * values(), values()}; }
  /// Returns the input of the last map.
  const T* results(const Call& call) {
    if (output_gate_) {
      this->ops_.mixers->output_gate(call.at(attention_), gates(call), projected_row(),
                                     call.at(formed_), shape_.tokens(), shape_.width());
      return call.at(formed_);
    }
    if (padding() == 0) return call.at(attention_);
    this->ops_.heads->copy_groups(heads(values()), call.at(attention_), in_results(),
                                  call.at(formed_), in_packed());
    return call.at(formed_);
  }

  AttentionShape shape_;
  std::size_t window_;
  KeySharing sharing_;
  bool rotates_ = false;
  RotaryAt rotary_;
  std::optional<Elems> sinks_;
  std::vector<LinearAt> inputs_;  ///< maps of heads
  std::optional<NormAt> query_norm_;
  std::optional<NormAt> key_norm_;
  bool whole_rows_ = false;       ///< see HeadMaps
  bool output_gate_ = false;      ///< results of attention are gated
  bool separate_gate_ = false;    ///< the second map makes the gates
  bool rotates_first_ = false;    ///< see HeadMaps
  bool norms_values_ = false;     ///< whether rows before norms have values, too
  bool keys_are_values_ = false;  ///< keys before their norm are values, too
  std::optional<LatentHeads<T>> latent_;
  LinearAt out_;
  ArrayList::Id projected_ = 0;  ///< [N, projected_row()]
  ArrayList::Id qkv_ = 0;        ///< [N, queries | keys | values]
  ArrayList::Id attention_ = 0;  ///< [N, heads x head_dim]
  ArrayList::Id attended_ = 0;   ///< like attention, by heads
  ArrayList::Id log_sums_ = 0;
  ArrayList::Id dresults_ = 0;  ///< like attention
  ArrayList::Id formed_ = 0;    ///< like attention, gated or without padding
  ArrayList::Id dqkv_ = 0;      ///< like qkv
};

}  // namespace ballast::model
