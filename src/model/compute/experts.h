#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ballast/core/memory.h"
#include "ballast/model/compute.h"

#include "src/model/compute/formulas.h"
#include "src/model/compute/layer.h"
#include "src/model/compute/routing.h"
#include "src/model/description/families/decoder.h"
#include "src/model/description/families/families.h"

namespace ballast::model {

/// Routers and experts of a model. A router reads the result of its norm and chooses experts for
/// each row. Each expert then computes its rows and adds them, weighted, to the sums of the half,
/// in the order of the experts. Rows are not padded to the fullest expert: the rows of one expert
/// are copied next to each other, a chunk at a time. `Ops`: layer.h.
template <class Ops>
class Experts {
 public:
  using T = typename Ops::Value;

  Experts(const Architecture& model, std::size_t tokens, Ops& ops)
      : width_(model.config.hidden_size), ops_(ops) {
    const auto* const described = dynamic_cast<const DecoderFamily*>(&family(model.config.family));
    for (std::size_t b = 0; described != nullptr && b < model.blocks.size(); ++b) {
      const BlockSpec& block = model.blocks[b];
      const bool routes = block.content == BlockContent::router;
      const bool shared = block.content == BlockContent::shared_expert;
      if (!routes && !shared && block.content != BlockContent::expert) continue;
      const ExpertsSpec spec = described->decoder(model.config, block.layer).experts;
      bound_.resize(model.blocks.size());
      if (routes) {
        routers_.push_back(b);
        bound_[b].router = find_linear(block, spec.router);
        if (!spec.correction.empty()) bound_[b].correction = block.tensor(spec.correction).offset;
        shape_ = {tokens,       spec.count,  spec.per_token,   spec.renormalises,
                  spec.sigmoid, spec.groups, spec.kept_groups, spec.factor};
        wide_ = std::max(spec.width, spec.shared_width);
        continue;
      }
      if (shared) gates_shared_ = !spec.shared_gate.empty();
      if (shared && gates_shared_) bound_[b].router = find_linear(block, spec.shared_gate);
      bind_maps(block, spec, shared ? spec.shared_prefix : spec.of_expert(block.expert, ""),
                bound_[b]);
      sharers_ = std::max<std::size_t>(sharers_, block.pieces);
    }
    if (routers_.empty()) return;
    const DecoderSpec spec = described->decoder(model.config, model.blocks[routers_.front()].layer);
    gating_ = {spec.activation, spec.experts.limit, spec.experts.slope};
    const std::size_t row = (2 * width_ + 4 * wide_) * sizeof(T) + width_ * sizeof(float);
    chunk_ = std::max(round_up(chunk_rows(tokens, row, ops_.traits.mlp.bytes), kRowStep),
                      sharers_ > 1 ? sharers_ * kRowStep : 0);
    losses_ = model::router_losses(model.config);
  }

  [[nodiscard]] bool empty() const { return routers_.empty(); }
  [[nodiscard]] std::size_t experts() const { return shape_.experts; }

  /// Bytes of Port::normed for a micro-batch: the norm's result and the routing.
  [[nodiscard]] std::size_t rows_bytes() const {
    if (empty()) return 0;
    Bump counting;
    static_cast<void>(take_rows(counting));
    return counting.used();
  }

  void take_memory(Bump& bump) {
    if (empty()) return;
    logits_ = bump.take<float>(shape_.rows * shape_.step());
    dlogits_ = bump.take<T>(shape_.rows * shape_.step());
    x_ = bump.take<T>(chunk_ * width_);
    dy_ = bump.take<T>(chunk_ * width_);
    hidden_ = bump.take<T>(chunk_ * 2 * wide_);
    activated_ = bump.take<T>(chunk_ * wide_);
    dactivated_ = bump.take<T>(chunk_ * wide_);
    sums_ = bump.take<float>(chunk_ * width_);
    gate_ = Routing::take(bump, gate_shape());
    if (shape_.sigmoid) moved_ = bump.take<float>(shape_.experts);
    if (sharers_ == 1) return;
    sent_ = bump.take<T>(chunk_ * width_);
    returned_ = bump.take<float>(chunk_ * width_);
    dots_ = bump.take<float>(chunk_);
    returned_dots_ = bump.take<float>(chunk_);
  }

  /// Routes the rows whose norm is at the start of `rows`. `targets`: see host::Ops::route().
  /// `moved`: PassArguments::correction_biases. `starts` [experts + 1], `totals` and `losses` [2]
  /// are null if not wanted. The first router resets the totals; the last one computes the losses
  /// from them.
  void route(std::size_t block, const BlockWeights<T>& weights, std::span<const float> moved,
             const std::int32_t* targets, std::byte* rows, std::int32_t* starts, double* totals,
             double* losses) {
    const Rows at = rows_at(rows);
    const Linear<T> router = weights[bound_[block].router];
    ops_.products->multiply({shape_.rows, shape_.experts, width_}, matrix(at.normed, width_),
                            transposed(router.weight, width_), matrix(logits_, shape_.step()));
    const T* const correction =
        bound_[block].correction ? weights.weights + *bound_[block].correction : nullptr;
    if (!moved.empty()) ops_.elementwise->put(moved, moved_);
    ops_.routers->route(shape_, logits_,
                        {router.bias, correction, moved.empty() ? nullptr : moved_}, targets,
                        at.routing, starts);
    if (totals == nullptr) return;
    const RouterTotals sums = RouterTotals::at(totals, shape_.experts);
    ops_.routers->add_router_totals(shape_, at.routing, block == routers_.front(), sums);
    if (losses != nullptr && block == routers_.back()) {
      ops_.routers->router_losses(shape_, sums, losses);
    }
  }

  /// Adds an expert's results for its choices [first, first + count) to `sums` [N, H].
  void forward(std::size_t block, const BlockWeights<T>& weights, std::byte* rows,
               std::size_t first, std::size_t count, float* sums) {
    const Rows at = rows_at(rows);
    add_results(block, weights, at, at.routing, {shape_.per_token, first, count}, sums);
  }

  /// Backward pass of an expert, given `dy` [N, H]: adds the gradients of its weights, writes those
  /// of the weights of its choices, and adds the gradient of the norm's result to `sums`.
  void backward(std::size_t block, const BlockWeights<T>& weights, std::byte* rows,
                std::size_t first, std::size_t count, const T* dy, float* sums) {
    const Rows at = rows_at(rows);
    add_gradients(block, weights, at, at.routing, {shape_.per_token, first, count}, dy, sums);
  }

  // Experts shared by ranks (expert_exchange.h): the work between two exchanges of rows.

  /// Number of choices of one rank for one expert in an exchange.
  [[nodiscard]] std::size_t rows_per_exchange() const { return chunk_ / sharers_; }
  /// Device memory for rows that are sent or received, `count` each.
  struct ExchangeBuffers {
    DeviceBytes sent;       ///< [rows, H] of T: copies of rows
    DeviceBytes inputs;     ///< [rows, H] of T
    DeviceBytes gradients;  ///< [rows, H] of T: gradients of results, weighted
    DeviceBytes results;    ///< [rows, H] fp32: results, or gradients of inputs
    DeviceBytes returned;   ///< [rows, H] fp32
    DeviceBytes dots;       ///< [rows] fp32: gradients of weights, times the weights
    DeviceBytes returned_dots;
  };
  [[nodiscard]] ExchangeBuffers exchange_buffers() const {
    const auto rows = [this](auto* at, std::size_t width) {
      return DeviceBytes(reinterpret_cast<std::byte*>(at), chunk_ * width * sizeof *at);
    };
    return {rows(sent_, width_),     rows(x_, width_), rows(dy_, width_),      rows(sums_, width_),
            rows(returned_, width_), rows(dots_, 1),   rows(returned_dots_, 1)};
  }
  /// Copies the inputs of choices next to each other, by expert.
  void collect_inputs(std::byte* rows, const std::vector<ExpertChoices>& choices) {
    const Rows at = rows_at(rows);
    collect(at, choices, at.normed, nullptr);
  }
  /// Copies the gradients of the choices' results next to each other, from `dy` [N, H].
  void collect_gradients(std::byte* rows, const std::vector<ExpertChoices>& choices, const T* dy) {
    const Rows at = rows_at(rows);
    collect(at, choices, dy, at.routing.weights);
  }
  /// Computes the results of `count` inputs received from all ranks.
  void compute_received(std::size_t block, const BlockWeights<T>& weights, std::size_t count) {
    if (count == 0) return;
    const std::size_t padded = pad(x_, count);
    compute(block, weights, padded);
    multiply_last(block, weights, count, padded);
  }
  /// Computes the gradients of inputs and of choices' weights from the inputs and the gradients of
  /// results received from all ranks. Adds the gradients of the expert's weights.
  void differentiate_received(std::size_t block, const BlockWeights<T>& weights,
                              std::size_t count) {
    if (count == 0) return;
    const std::size_t padded = pad(x_, count);
    pad(dy_, count);
    compute(block, weights, padded);
    differentiate(block, weights, padded);
    multiply_weights(block, weights, {nullptr, count, 1}, nullptr, dots_);
    differentiate_inputs(block, weights, padded);
  }
  /// Adds returned results to `sums`, in the order of experts.
  void add_returned(std::byte* rows, const std::vector<ExpertChoices>& choices, float* sums) {
    const Rows at = rows_at(rows);
    by_experts(at, choices, [&](const ExpertRows& own, std::size_t first) {
      ops_.experts->add_rows(own, returned_ + first * width_, at.routing.weights, sums, width_);
    });
  }
  /// Adds returned gradients of inputs to `sums`, and writes those of the choices' weights.
  void add_returned_gradients(std::byte* rows, const std::vector<ExpertChoices>& choices,
                              float* sums) {
    const Rows at = rows_at(rows);
    by_experts(at, choices, [&](const ExpertRows& own, std::size_t first) {
      ops_.experts->add_rows(own, returned_ + first * width_, nullptr, sums, width_);
      ops_.experts->put_quotients(own, returned_dots_ + first, at.routing.weights,
                                  at.routing.weight_gradients);
    });
  }

  /// Like forward() and backward(), for the expert of all rows. With a gate its weight is
  /// sigmoid(z), which is the softmax of (z, 0), so the gate is a router that chooses between it
  /// and nothing. Without a gate, it is the only expert of a router, which gives it the weight 1.
  void shared_forward(std::size_t block, const BlockWeights<T>& weights, std::byte* rows,
                      float* sums) {
    const Rows at = rows_at(rows);
    weigh_all(block, weights, at);
    add_results(block, weights, at, gate_, {gate_shape().per_token, 0, shape_.rows}, sums);
  }
  void shared_backward(std::size_t block, const BlockWeights<T>& weights, std::byte* rows,
                       const T* dy, float* sums) {
    const Rows at = rows_at(rows);
    weigh_all(block, weights, at);
    ops_.elementwise->zero(gate_.weight_gradients, gate_shape().choices());
    add_gradients(block, weights, at, gate_, {gate_shape().per_token, 0, shape_.rows}, dy, sums);
    if (!gates_shared_) return;
    ops_.routers->router_gradient(gate_shape(), gate_, {}, {}, dlogits_);
    add_router_gradient(weights[bound_[block].router], at, gate_shape(), sums);
  }

  /// Backward pass of the router, after all experts: adds the gradient of its weights, and that of
  /// the norm's result to `sums`. `scale`: gradient of the router losses; without these, `totals`
  /// are null.
  void router_backward(std::size_t block, const BlockWeights<T>& weights, std::byte* rows,
                       double* totals, float scale, float* sums) {
    const Rows at = rows_at(rows);
    const Linear<T> router = weights[bound_[block].router];
    const RouterLossScales scales = {losses_.balance * scale * static_cast<double>(shape_.experts),
                                     2.0 * losses_.z * scale};
    const RouterTotals sums_of_all =
        totals == nullptr ? RouterTotals() : RouterTotals::at(totals, shape_.experts);
    ops_.routers->router_gradient(shape_, at.routing, sums_of_all, scales, dlogits_);
    add_router_gradient(router, at, shape_, sums);
  }

 private:
  /// Chunks are padded to a multiple of this many rows, so that products have few shapes.
  static constexpr std::size_t kRowStep = 16;

  struct Bound {
    LinearAt router;  ///< or the gate of the expert for all rows
    std::optional<Elems> correction;
    std::vector<LinearAt> in;  ///< gate and up, or one map for both
    LinearAt out;
  };
  struct Rows {
    T* normed = nullptr;  ///< [N, H]
    Routing routing;
  };
  Rows take_rows(Bump& bump) const {
    Rows rows;
    rows.normed = bump.take<T>(shape_.rows * width_);
    rows.routing = Routing::take(bump, shape_);
    return rows;
  }
  [[nodiscard]] Rows rows_at(std::byte* place) const {
    Bump bump(place);
    return take_rows(bump);
  }

  /// Choices [first, first + count) of a routing with `per_token` choices per token.
  struct Choices {
    std::size_t per_token = 0;
    std::size_t first = 0;
    std::size_t count = 0;
  };

  void bind_maps(const BlockSpec& block, const ExpertsSpec& spec, const std::string& before,
                 Bound& bound) const {
    if (spec.fused && block.content == BlockContent::expert) {
      bound.in = {find_stacked(block, before + kFusedGate)};
      bound.out = find_stacked(block, before + spec.down);
      return;
    }
    if (spec.stacked) {
      bound.in = {find_stacked(block, before + spec.gate)};
      bound.out = find_stacked(block, before + spec.down);
      return;
    }
    bound.in = {find_linear(block, before + spec.gate), find_linear(block, before + spec.up)};
    if (ops_.traits.mlp.joins_gate_and_up) bound.in = joined(bound.in);
    bound.out = find_linear(block, before + spec.down);
  }

  [[nodiscard]] RouterShape gate_shape() const {
    const std::size_t choices = gates_shared_ ? 2 : 1;
    return {.rows = shape_.rows, .experts = choices, .per_token = choices};
  }
  /// Computes the weights of all rows for the expert of all rows, which has the first N places.
  void weigh_all(std::size_t block, const BlockWeights<T>& weights, const Rows& at) {
    const RouterShape shape = gate_shape();
    ops_.elementwise->zero(logits_, shape.rows * shape.step());
    if (gates_shared_) {
      ops_.products->multiply({shape.rows, 1, width_}, matrix(at.normed, width_),
                              transposed(weights[bound_[block].router].weight, width_),
                              matrix(logits_, shape.step()));
    }
    ops_.routers->route(shape, logits_, {}, nullptr, gate_, nullptr);
  }
  void add_router_gradient(const Linear<T>& router, const Rows& at, const RouterShape& shape,
                           float* sums) {
    add_bias_gradient(ops_, router, dlogits_, shape.step(), shape.rows);
    ops_.products->linear_weight(router, at.normed, dlogits_, shape.step(), shape.rows);
    ops_.products->linear_input_part(router, dlogits_, shape.step(), sums, shape.rows, true);
  }

  void add_results(std::size_t block, const BlockWeights<T>& weights, const Rows& at,
                   const Routing& routing, const Choices& choices, float* sums) {
    by_chunks(routing, choices, [&](const ExpertRows& chunk, std::size_t padded) {
      ops_.experts->gather_rows(chunk, at.normed, nullptr, x_, padded, width_);
      compute(block, weights, padded);
      multiply_last(block, weights, chunk.count, padded);
      ops_.experts->add_rows(chunk, sums_, routing.weights, sums, width_);
    });
  }
  void add_gradients(std::size_t block, BlockWeights<T> weights, const Rows& at,
                     const Routing& routing, const Choices& choices, const T* dy, float* sums) {
    by_chunks(routing, choices, [&](const ExpertRows& chunk, std::size_t padded) {
      ops_.experts->gather_rows(chunk, at.normed, nullptr, x_, padded, width_);
      ops_.experts->gather_rows(chunk, dy, routing.weights, dy_, padded, width_);
      compute(block, weights, padded);
      differentiate(block, weights, padded);
      multiply_weights(block, weights, chunk, routing.weights, routing.weight_gradients);
      differentiate_inputs(block, weights, padded);
      ops_.experts->add_rows(chunk, sums_, nullptr, sums, width_);
      // Later chunks add to the sums of the first.
      weights.accumulation = Accumulation::later;
    });
  }

  /// Calls work(choices, padded number of rows) for each chunk.
  template <class Work>
  void by_chunks(const Routing& routing, const Choices& choices, const Work& work) {
    for (std::size_t done = 0; done < choices.count; done += chunk_) {
      const std::size_t here = std::min(chunk_, choices.count - done);
      work(ExpertRows{routing.places + choices.first + done, here, choices.per_token},
           round_up(here, kRowStep));
    }
  }

  [[nodiscard]] GateUp<T> gate_up(std::size_t block, std::size_t rows) const {
    const bool one = bound_[block].in.size() == 1;
    const std::size_t wide = bound_[block].out.in;
    return {hidden_, hidden_ + (one ? wide : rows * wide), one ? 2 * wide : wide, rows, wide};
  }

  /// Calls work(choices, number of the first) for each expert.
  template <class Work>
  void by_experts(const Rows& at, const std::vector<ExpertChoices>& choices,
                  const Work& work) const {
    std::size_t first = 0;
    for (const ExpertChoices& own : choices) {
      work(ExpertRows{at.routing.places + own.first, own.count, shape_.per_token}, first);
      first += own.count;
    }
  }
  void collect(const Rows& at, const std::vector<ExpertChoices>& choices, const T* from,
               const float* weights) {
    by_experts(at, choices, [&](const ExpertRows& own, std::size_t first) {
      ops_.experts->gather_rows(own, from, weights, sent_ + first * width_, own.count, width_);
    });
  }
  /// Writes zeros after `count` rows. Returns the padded number of rows.
  std::size_t pad(T* rows, std::size_t count) {
    const std::size_t padded = round_up(count, kRowStep);
    ops_.experts->gather_rows({}, rows, nullptr, rows + count * width_, padded - count, width_);
    return padded;
  }

  /// Computes the intermediates of the rows in x_.
  void compute(std::size_t block, const BlockWeights<T>& weights, std::size_t padded) {
    const GateUp<T> pair = gate_up(block, padded);
    T* to = pair.gate;
    for (const LinearAt& part : bound_[block].in) {
      ops_.products->linear(weights[part], x_, to, pair.step, padded);
      to = pair.up;
    }
    ops_.elementwise->glu(gating_, pair, activated_);
  }
  /// Multiplies by the last map; the results are in sums_.
  void multiply_last(std::size_t block, const BlockWeights<T>& weights, std::size_t rows,
                     std::size_t padded) {
    const Linear<T> out = weights[bound_[block].out];
    const Product p = forward_product(out, activated_, sums_, width_, padded);
    ops_.products->multiply(p.extents, p.a, p.b, p.c);
    ops_.elementwise->add_bias(out.bias, sums_, rows, width_);
  }

  /// Backward pass of the last map, from the gradients of results in dy_.
  void differentiate(std::size_t block, const BlockWeights<T>& weights, std::size_t padded) {
    const Linear<T> out = weights[bound_[block].out];
    add_bias_gradient(ops_, out, dy_, width_, padded);
    ops_.products->linear_weight(out, activated_, dy_, width_, padded);
    ops_.products->linear_input(out, dy_, width_, dactivated_, padded);
  }
  /// Computes the gradients of the choices' weights.
  void multiply_weights(std::size_t block, const BlockWeights<T>& weights,
                        const ExpertRows& choices, const float* factors, float* gradients) {
    const Linear<T> out = weights[bound_[block].out];
    ops_.experts->dot_rows(choices, activated_, dactivated_, factors, gradients, out.in);
    if (out.bias == nullptr) return;
    ops_.experts->dot_bias(choices, out.bias, dy_, factors, gradients, width_);
  }
  /// Backward pass of gate and up. Leaves the gradient of the rows' norm result in sums_.
  void differentiate_inputs(std::size_t block, const BlockWeights<T>& weights, std::size_t padded) {
    const GateUp<T> pair = gate_up(block, padded);
    ops_.elementwise->glu_backward(gating_, pair, dactivated_);
    const T* from = pair.gate;
    for (const LinearAt& part : bound_[block].in) {
      add_bias_gradient(ops_, weights[part], from, pair.step, padded);
      ops_.products->linear_weight(weights[part], x_, from, pair.step, padded);
      ops_.products->linear_input_part(weights[part], from, pair.step, sums_, padded,
                                       from != pair.gate);
      from = pair.up;
    }
  }

  std::size_t width_;
  std::size_t wide_ = 0;  ///< I of the widest expert
  RouterShape shape_;
  RouterLosses losses_;
  Gating gating_;
  Ops& ops_;
  std::vector<Bound> bound_;          ///< by block
  std::vector<std::size_t> routers_;  ///< blocks
  std::size_t chunk_ = 0;             ///< rows per chunk
  float* logits_ = nullptr;           ///< [N, step]
  T* dlogits_ = nullptr;              ///< [N, step]
  T* x_ = nullptr;                    ///< [chunk, H]
  T* dy_ = nullptr;                   ///< [chunk, H]
  T* hidden_ = nullptr;               ///< [chunk, 2 I]
  T* activated_ = nullptr;            ///< [chunk, I]
  T* dactivated_ = nullptr;           ///< [chunk, I]
  float* sums_ = nullptr;             ///< [chunk, H]
  Routing gate_;                      ///< routing of the expert for all rows
  float* moved_ = nullptr;            ///< [experts], see RouterBiases
  bool gates_shared_ = true;          ///< whether the expert for all rows has a gate
  std::size_t sharers_ = 1;           ///< ranks that share a block, with one expert each
  // With several sharers, see ExchangeBuffers.
  T* sent_ = nullptr;
  float* returned_ = nullptr;
  float* dots_ = nullptr;
  float* returned_dots_ = nullptr;
};

}  // namespace ballast::model
