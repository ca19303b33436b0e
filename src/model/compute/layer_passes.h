#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "ballast/core/error.h"

#include "src/model/compute/part.h"

namespace ballast::model {

/// Forward and backward passes of one block: a layer, its sublayers before experts, or a tile of
/// one sublayer. Sublayers run one after the other. The last ones whose rows are independent, the
/// tail, run together in chunks of rows.
template <class T>
class LayerPasses {
 public:
  using Call = LayerCall<T>;

  /// `spec`: that of the layer, or of its widest tile. `block`: null if only the memory is wanted.
  LayerPasses(const LayerSpec& spec, std::uint64_t layer, const KeySharing& sharing,
              const BlockSpec* block, LayerTools<T>& tools)
      : tools_(tools), ops_(tools.ops) {
    const auto is_here = [&](const SublayerSpec& sublayer) {
      if (block == nullptr || !tools.tiles) return true;
      return std::holds_alternative<MlpSpec>(sublayer.body) ==
             (block->content == BlockContent::mlp);
    };
    for (const SublayerSpec& from : spec.sublayers) {
      if (std::holds_alternative<ExpertsSpec>(from.body)) break;
      const Binder binder(is_here(from) ? block : nullptr, spec.input_first);
      if (binder.block() != nullptr) own_ = sublayers_.size();
      Sublayer made = {.part = make_part<T>(from.body, layer, sharing, binder, tools),
                       .reads = from.reads};
      if (from.before) made.before = tools.tiles ? NormAt() : binder.norm(*from.before);
      if (from.after) made.after = binder.norm(*from.after);
      made.factor = static_cast<float>(from.factor);
      expects(!from.after || from.factor == 1.0, "a result has a norm or a factor");
      sublayers_.push_back(std::move(made));
    }
    if (!spec.result_scale.empty() && block != nullptr) {
      result_scale_ = block->tensor(spec.result_scale).offset;
    }
    if (spec.input_norm) input_norm_ = Binder(nullptr, false).norm(*spec.input_norm);
    tail_ = sublayers_.size();
    while (tail_ > 0 && part(tail_ - 1).by_rows()) --tail_;
    listed_ = std::min(tail_ + 1, sublayers_.size());
    declare(kept_, tools.rows());
    declare(chunked_, tools.mlp_rows);
  }

  /// Arrays of calls that keep them, and of others.
  [[nodiscard]] const ArrayList& arrays(bool kept) const { return kept ? kept_ : chunked_; }
  void take_scratch(Bump& bump) {
    for (Sublayer& sublayer : sublayers_) sublayer.part->take_scratch(bump);
  }
  template <class Visit>
  void for_maps(const Visit& visit) const {
    for (const Sublayer& sublayer : sublayers_) sublayer.part->for_maps(visit);
  }

  /// in [N, H] -> out [N, H].
  void forward(const Call& call, const T* in, T* out) {
    enter(call, in, true);
    compute(call);
    if (call.links.normed != nullptr) {
      const T* const normed = x_of(call, sublayers_.size() - 1);
      ops_.elementwise->copy_bytes(reinterpret_cast<const std::byte*>(normed),
                                   reinterpret_cast<std::byte*>(call.links.normed),
                                   activation(tools_.rows()));
    }
    begin(call);
    if (tail_ == sublayers_.size()) {
      add(call, sublayers_.back(), all(), residual_of(call, tail_ - 1), out);
    } else {
      by_chunks([&](const MapRows& rows) {
        const std::size_t at = rows.first * tools_.hidden;
        part(tail_).prepare(call, x_of(call, tail_) + at, rows);
        add(call, sublayers_[tail_], rows, residual_of(call, tail_) + at, out + at);
        for (std::size_t i = tail_ + 1; i < sublayers_.size(); ++i) {
          part(i).prepare(call, out + at, rows);
          add(call, sublayers_[i], rows, out + at, out + at);
        }
      });
    }
    scale(call, out);
  }
  /// Replaces dy, the gradient of the output, by that of the input.
  void backward(const Call& call, const T* in, T* dy) {
    enter(call, in, !call.kept);
    if (!call.kept) {
      compute(call);
      // The norm after the last sublayer reads its result.
      const Sublayer& last = sublayers_.back();
      if (tail_ == sublayers_.size() && last.after && !call.knows())
        last.part->finish(call, all(), {.to = last.part->raw(call, all())});
    }
    scale(call, dy);
    if (tail_ < sublayers_.size()) {
      begin(call);
      Call chunk = call;
      by_chunks([&](const MapRows& rows) {
        tail_backward(chunk, rows, dy);
        chunk = call.later();
      });
      norm_backward(call, tail_, dy);
      part(tail_).end_sublayer(call, stream_of(call, tail_), dy);
    }
    for (std::size_t i = tail_; i-- > 0;) {
      differentiate(call, i, x_of(call, i), all(), dy);
      norm_backward(call, i, dy);
    }
    for (std::size_t i = sublayers_.size(); i-- > 0;) part(i).end_layer(call, in, dy);
    if (input_norm_) {
      ops_.norms->norm_backward(tools_.norm(call.block, *input_norm_), in, dy, nullptr, dy,
                                tools_.rows());
    }
  }
  /// Writes the tile's part of the output [N, H]. `x` [N, H]: result of the norm.
  void forward_tile(const Call& call, const T* x, float* to) {
    by_rows_of(own_, [&](const MapRows& rows) {
      const std::size_t at = rows.first * tools_.hidden;
      part(own_).prepare(call, x + at, rows);
      part(own_).finish(call, rows, {.part = to + at});
    });
  }
  /// Writes the tile's part of the gradient of `x` [N, H].
  void backward_tile(const Call& call, const T* x, const T* dy, float* to) {
    Call chunk = call;
    by_rows_of(own_, [&](const MapRows& rows) {
      const std::size_t at = rows.first * tools_.hidden;
      part(own_).prepare(chunk, x + at, rows);
      const DeviceView<float>& norms = call.head_norms.gradient;
      if (own_ < tail_ && !norms.empty()) ops_.elementwise->zero(norms.raw(), norms.size());
      part(own_).backward(chunk, x + at, rows, dy + at, {.part = to + at});
      chunk = call.later();
    });
  }

 private:
  struct Sublayer {
    std::unique_ptr<LayerPart<T>> part;
    std::optional<NormAt> before;
    std::optional<NormAt> after;
    Reads reads = Reads::stream;
    float factor = 1.0F;
    ArrayList::Id normed = 0;  ///< [N, H] result of the norm before it
    ArrayList::Id dx = 0;      ///< [N, H] gradient of `normed`
    ArrayList::Id stream = 0;  ///< [N, H] residual stream after it
    ArrayList::Id aside = 0;   ///< [N, H] gradient of what an earlier sublayer reads, too
  };

  LayerPart<T>& part(std::size_t sublayer) const { return *sublayers_[sublayer].part; }
  [[nodiscard]] MapRows all() const { return {0, tools_.rows()}; }
  [[nodiscard]] Bytes activation(std::size_t rows) const {
    return rows * tools_.hidden * sizeof(T);
  }

  /// Declares the arrays of all sublayers up to the first one of the tail. `chunk`: rows of a part
  /// by rows.
  void declare(ArrayList& list, std::size_t chunk) {
    if (input_norm_) {
      const LayerMoments first = moments(0);
      input_ = list.own("input of the layer", activation(tools_.rows()),
                        {first.at(LayerMoments::before), first.at(LayerMoments::d_before)});
    }
    for (std::size_t i = 0; i < listed_; ++i) declare_own(list, i);
    if (!tools_.tiles) declare_aside(list);
    SharedPlaces places;
    places.turn = list.place("turn");
    if (!tools_.tiles) declare_turn(list, places.turn);
    for (std::size_t i = 0; i < listed_; ++i) {
      if (in_chunks(i)) declare_raw(list, i, chunk);
    }
    places.work = list.place("work");
    for (std::size_t i = 0; i < listed_; ++i) {
      SharedPlaces own = places;
      // Its work lives until its backward pass, after that of later sublayers.
      if (part(i).by_rows() && !in_chunks(i)) own.work = list.place("work of an earlier sublayer");
      part(i).share(list, moments(i), own, in_chunks(i) ? chunk : tools_.rows());
    }
    list.finish();
  }
  [[nodiscard]] LayerMoments moments(std::size_t sublayer) const {
    return {static_cast<int>(listed_), static_cast<int>(sublayer)};
  }
  /// Whether the sublayer runs in chunks of rows.
  [[nodiscard]] bool in_chunks(std::size_t i) const { return i >= tail_; }
  [[nodiscard]] bool is_last_listed(std::size_t i) const { return i + 1 == listed_; }
  /// Whether the result of the norm before the sublayer is in the shared place.
  [[nodiscard]] bool shares_turn(std::size_t i) const {
    return i > 0 && is_last_listed(i) && in_chunks(i);
  }
  void declare_own(ArrayList& list, std::size_t i) {
    using M = LayerMoments;
    Sublayer& own = sublayers_[i];
    const M at = moments(i);
    const Bytes rows = activation(tools_.rows());
    if (own.before && !tools_.tiles && !shares_turn(i)) {
      own.normed = list.own("input of a sublayer", rows, {at.at(M::before), at.at(M::d_maps)});
    }
    own.part->arrays(list, at);
    if (!in_chunks(i)) declare_raw(list, i, tools_.rows());
    if (is_last_listed(i) || tools_.tiles) return;
    // Sublayers of one norm do not read the stream between them, so it is written in place.
    const bool in_place = i > 0 && own.reads == Reads::same_norm;
    const M next = moments(i + 1);
    const bool read = sublayers_[i + 1].reads == Reads::stream;
    const ArrayLife life = {at.at(M::out), read ? next.at(M::d_before) : next.at(M::out)};
    own.stream = in_place
                     ? list.add(list.place_of(sublayers_[i - 1].stream), "stream", rows, {life})
                     : list.own("stream", rows, life, true);
  }
  void declare_raw(ArrayList& list, std::size_t i, std::size_t rows) {
    const bool normed = sublayers_[i].after.has_value();
    if (!normed && sublayers_[i].factor == 1.0F) return;
    const LayerMoments at = moments(i);
    part(i).use_raw(
        list.own(normed ? "result before its norm" : "result before its factor", activation(rows),
                 {at.at(LayerMoments::out), at.at(LayerMoments::d_out)}, normed && !in_chunks(i)));
  }
  /// Gradients of what an earlier sublayer reads, too, wait in the memory of the stream between.
  void declare_aside(ArrayList& list) {
    for (std::size_t i = 1; i < listed_; ++i) {
      Sublayer& own = sublayers_[i];
      if (own.reads == Reads::stream) continue;
      const LayerMoments at = moments(i);
      const Moment from =
          at.at(own.reads == Reads::layer_input ? LayerMoments::d_before : LayerMoments::d_maps);
      own.aside =
          list.add(list.place_of(sublayers_[i - 1].stream), "gradient of what two sublayers read",
                   activation(tools_.rows()), {{from, moments(i - 1).at(LayerMoments::d_before)}});
    }
  }
  void declare_turn(ArrayList& list, ArrayList::Place turn) {
    using M = LayerMoments;
    const Bytes rows = activation(tools_.rows());
    for (std::size_t i = 0; i < listed_; ++i) {
      Sublayer& own = sublayers_[i];
      const M at = moments(i);
      if (own.before && shares_turn(i)) {
        own.normed = list.add(turn, "input of the last sublayer", rows,
                              {{at.at(M::before), at.at(M::d_maps)}});
      }
      if (own.reads == Reads::same_norm) {
        own.dx = own.aside;
      } else if (shares_next_norm(i)) {
        own.dx = sublayers_[i + 1].aside;
      } else {
        own.dx = list.add(turn, "gradient of a sublayer's input", rows,
                          {{at.at(M::d_maps), at.at(M::d_before)}});
      }
    }
  }
  [[nodiscard]] bool shares_next_norm(std::size_t i) const {
    return i + 1 < listed_ && sublayers_[i + 1].reads == Reads::same_norm;
  }

  /// Returns the residual stream that a sublayer's norm reads.
  const T* stream_of(const Call& call, std::size_t i) const {
    if (i == 0 || sublayers_[i].reads == Reads::layer_input) return in_;
    return call.at(sublayers_[i - 1].stream);
  }
  /// Returns the residual stream that a sublayer adds to.
  const T* residual_of(const Call& call, std::size_t i) const {
    return i == 0 ? in_ : call.at(sublayers_[i - 1].stream);
  }
  /// Returns the input of a sublayer's part.
  const T* x_of(const Call& call, std::size_t i) const {
    if (sublayers_[i].reads == Reads::same_norm) return x_of(call, i - 1);
    return sublayers_[i].before ? call.at(sublayers_[i].normed) : stream_of(call, i);
  }

  /// Sets the input of the call, and computes its norm if there is one and it is not kept.
  void enter(const Call& call, const T* in, bool computes) {
    in_ = in;
    if (!input_norm_) return;
    T* const normed = call.at(input_);
    if (computes)
      ops_.norms->norm(tools_.norm(call.block, *input_norm_), in, normed, tools_.rows());
    in_ = normed;
  }
  void begin(const Call& call) {
    for (std::size_t i = sublayers_.size(); i-- > 0;) {
      const bool listed = i < listed_;
      part(i).begin(call, in_, listed ? stream_of(call, i) : nullptr);
    }
  }
  /// Computes everything that the last listed sublayer reads, and its intermediates unless it is in
  /// the tail.
  void compute(const Call& call) {
    for (std::size_t i = 0; i < listed_; ++i) {
      const Sublayer& own = sublayers_[i];
      if (own.before) {
        ops_.norms->norm(call.block[*own.before], stream_of(call, i), call.at(own.normed),
                         tools_.rows());
      }
      if (i == tail_) return;
      part(i).prepare(call, x_of(call, i), all());
      if (i + 1 == sublayers_.size() || call.knows()) continue;
      add(call, own, all(), residual_of(call, i), call.at(own.stream));
    }
  }
  /// Adds the result of a prepared sublayer to rows of the residual stream.
  void add(const Call& call, const Sublayer& own, const MapRows& rows, const T* residual, T* to) {
    if (!own.after && own.factor == 1.0F) {
      return own.part->finish(call, rows, {.to = to, .residual = residual});
    }
    T* const raw = own.part->raw(call, rows);
    own.part->finish(call, rows, {.to = raw});
    if (own.after) return add_result(call, own, rows, residual, to);
    scale_rows(own, rows, raw, to, residual);
  }
  /// to = factor * from (+ residual).
  void scale_rows(const Sublayer& own, const MapRows& rows, const T* from, T* to,
                  const T* residual = nullptr) {
    const std::size_t width = tools_.hidden;
    ops_.adapters->scale_columns({.x = from,
                                  .x_step = width,
                                  .y = to,
                                  .y_step = width,
                                  .rows = rows.count,
                                  .width = width,
                                  .residual = residual,
                                  .factor = own.factor});
  }
  void add_result(const Call& call, const Sublayer& own, const MapRows& rows, const T* residual,
                  T* to) {
    ops_.norms->norm(call.block[*own.after], own.part->result(call, rows), to, rows.count,
                     residual);
  }

  /// The backward pass of the tail for some rows.
  void tail_backward(const Call& call, const MapRows& rows, T* dy) {
    const std::size_t at = rows.first * tools_.hidden;
    const Sublayer& first = sublayers_[tail_];
    const T* const x = x_of(call, tail_) + at;
    if (!call.kept) recompute(call, first, x, rows);
    for (std::size_t i = sublayers_.size(); --i > tail_;) {
      expects(i == tail_ + 1, "at most one sublayer follows the first one by rows");
      T* const stream = part(i).stream();
      const T* const residual = residual_of(call, tail_) + at;
      if (first.after) {
        add_result(call, first, rows, residual, stream);
      } else {
        add(call, first, rows, residual, stream);
      }
      recompute(call, sublayers_[i], stream, rows);
      differentiate(call, i, stream, rows, dy);
    }
    differentiate(call, tail_, x, rows, dy);
  }
  void recompute(const Call& call, const Sublayer& own, const T* x, const MapRows& rows) {
    own.part->prepare(call, x, rows);
    if (own.after) own.part->finish(call, rows, {.to = own.part->raw(call, rows)});
  }
  /// Whether experts, which have other passes, read the norm of the sublayer, too.
  [[nodiscard]] bool precedes_experts(const Call& call, std::size_t i) const {
    return call.links.normed_gradient != nullptr && i + 1 == sublayers_.size();
  }
  /// Whether later sublayers have written their gradient of the norm's result.
  [[nodiscard]] bool is_shared(const Call& call, std::size_t i) const {
    return shares_next_norm(i) || precedes_experts(call, i);
  }
  T* dx_of(const Call& call, std::size_t i) const {
    return precedes_experts(call, i) ? call.links.normed_gradient : call.at(sublayers_[i].dx);
  }
  /// The backward pass of a sublayer after the norm before it.
  void differentiate(const Call& call, std::size_t i, const T* x, const MapRows& rows, T* dy) {
    const Sublayer& own = sublayers_[i];
    const std::size_t at = rows.first * tools_.hidden;
    const T* dout = dy + at;
    if (own.after) {
      T* const result = own.part->result(call, rows);
      ops_.norms->norm_backward(call.block[*own.after], result, dout, nullptr, result, rows.count);
      dout = result;
    } else if (own.factor != 1.0F) {
      T* const raw = own.part->raw(call, rows);
      scale_rows(own, rows, dout, raw);
      dout = raw;
    }
    const bool normed = own.before || own.reads == Reads::same_norm;
    const InputGradient<T> dx =
        normed ? InputGradient<T>{.to = dx_of(call, i) + at, .adds = is_shared(call, i)}
               : InputGradient<T>{.to = dy + at, .adds = true};
    own.part->backward(call, x, rows, dout, dx);
  }
  /// The backward pass of the norm before a sublayer, for all rows.
  void norm_backward(const Call& call, std::size_t i, T* dy) {
    const Sublayer& own = sublayers_[i];
    if (!own.before) return;
    const bool waits = i + 1 < listed_ && sublayers_[i + 1].reads == Reads::layer_input;
    const T* const sum = waits ? call.at(sublayers_[i + 1].aside) : dy;
    T* const to = own.reads == Reads::layer_input ? call.at(own.aside) : dy;
    ops_.norms->norm_backward(call.block[*own.before], stream_of(call, i), dx_of(call, i), sum, to,
                              tools_.rows());
  }

  /// Multiplies the layer's result, or its gradient, by the scale of the result, if there is one.
  void scale(const Call& call, T* result) {
    if (!result_scale_) return;
    ops_.elementwise->scale_by(call.block.weights + *result_scale_, kAddends, result,
                               tools_.rows() * tools_.hidden);
  }
  /// Calls work(rows) for chunks of all rows, in order. Chunks depend only on the shape, so that
  /// results do not depend on what is kept.
  template <class Work>
  void by_chunks(const Work& work) const {
    const std::size_t rows = tools_.rows();
    for (std::size_t first = 0; first < rows; first += tools_.mlp_rows) {
      work(MapRows{first, std::min(tools_.mlp_rows, rows - first)});
    }
  }
  template <class Work>
  void by_rows_of(std::size_t sublayer, const Work& work) const {
    if (in_chunks(sublayer)) return by_chunks(work);
    work(all());
  }

  LayerTools<T>& tools_;
  DeviceOps<T>& ops_;
  std::vector<Sublayer> sublayers_;
  std::size_t tail_ = 0;    ///< first sublayer of the tail
  std::size_t listed_ = 0;  ///< number of sublayers whose arrays are listed
  std::size_t own_ = 0;     ///< the sublayer of a tile
  std::optional<Elems> result_scale_;
  std::optional<NormAt> input_norm_;
  ArrayList::Id input_ = 0;  ///< [N, H] result of input_norm_
  ArrayList kept_;
  ArrayList chunked_;
  const T* in_ = nullptr;  ///< input of the current call, after its norm
};

}  // namespace ballast::model
