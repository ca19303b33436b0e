#include "src/model/compute/experts.h"

#include <algorithm>

#include "ballast/core/dtype.h"
#include "ballast/model/family.h"

#include "src/model/compute/matrix.h"
#include "src/model/compute/tensor_offsets.h"
#include "src/model/description/layer_spec.h"

namespace ballast::model {

template <class T>
Experts<T>::Experts(const Architecture& model, std::size_t tokens, DeviceOps<T>& ops)
    : width_(model.config.hidden_size), ops_(ops), maps_(model, ops) {
  for (std::size_t b = 0; b < model.blocks.size(); ++b) {
    const BlockSpec& block = model.blocks[b];
    const bool routes = block.content == BlockContent::router;
    const bool shared = block.content == BlockContent::shared_expert;
    if (!routes && !shared && block.content != BlockContent::expert) continue;
    const ExpertsSpec& spec = *model.layer(block.layer).find<ExpertsSpec>();
    bound_.resize(model.blocks.size());
    if (routes) {
      routers_.push_back(b);
      bound_[b].router = find_linear(block, spec.router);
      if (!spec.correction.empty()) bound_[b].correction = block.tensor(spec.correction).offset;
      corrects_ = !spec.correction.empty();
      shape_ = {tokens,      spec.count,       spec.per_token, spec.renormalises, spec.sigmoid,
                spec.groups, spec.kept_groups, spec.factor,    spec.least_sum};
      wide_ = std::max(spec.width, spec.shared_width);
      continue;
    }
    if (shared) gates_shared_ = !spec.shared_gate.empty();
    if (shared) shared_factor_ = spec.shared_factor;
    if (shared && gates_shared_) bound_[b].router = find_linear(block, spec.shared_gate);
    bind_maps(block, spec, shared ? spec.shared_prefix : spec.of_expert(block.expert, ""),
              bound_[b]);
    sharers_ = std::max<std::size_t>(sharers_, block.pieces);
  }
  if (routers_.empty()) return;
  const std::uint64_t layer = model.blocks[routers_.front()].layer;
  const ExpertsSpec& spec = *model.layer(layer).find<ExpertsSpec>();
  gating_ = {spec.activation, spec.limit, spec.slope};
  const std::size_t row = (2 * width_ + 4 * wide_) * sizeof(T) + width_ * sizeof(float);
  chunk_ = std::max(round_up(chunk_rows(tokens, row, ops_.traits.mlp.bytes), kRowStep),
                    sharers_ > 1 ? sharers_ * kRowStep : 0);
  losses_ = model::router_losses(model.config);
}

template <class T>
std::size_t Experts<T>::rows_bytes() const {
  if (empty()) return 0;
  Bump counting;
  static_cast<void>(take_rows(counting));
  return counting.used();
}

template <class T>
void Experts<T>::take_memory(Bump& bump) {
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
  if (corrects_) moved_ = bump.take<float>(shape_.experts);
  typename AdaptedMaps<T>::Most most;
  for (const Bound& bound : bound_) {
    most.add(bound.router, shape_.rows);
    for (const LinearAt& map : bound.in) most.add(map, chunk_);
    most.add(bound.out, chunk_);
  }
  maps_.take_memory(bump, most);
  if (sharers_ == 1) return;
  sent_ = bump.take<T>(chunk_ * width_);
  returned_ = bump.take<float>(chunk_ * width_);
  dots_ = bump.take<float>(chunk_);
  returned_dots_ = bump.take<float>(chunk_);
}

template <class T>
void Experts<T>::route(std::size_t block, const BlockWeights<T>& weights,
                       std::span<const float> moved, const std::int32_t* targets, std::byte* rows,
                       std::int32_t* starts, double* totals, double* losses) {
  const Rows at = rows_at(rows);
  const Linear<T> router = weights[bound_[block].router];
  maps_.linear_sums(weights, bound_[block].router, at.normed, logits_, shape_.step(),
                    {0, shape_.rows});
  const T* const correction =
      bound_[block].correction ? weights.weights + *bound_[block].correction : nullptr;
  if (!moved.empty()) ops_.elementwise->put(moved, moved_);
  ops_.routers->route(shape_, logits_, {router.bias, correction, moved.empty() ? nullptr : moved_},
                      targets, at.routing, starts);
  if (totals == nullptr) return;
  const RouterTotals sums = RouterTotals::at(totals, shape_.experts);
  ops_.routers->add_router_totals(shape_, at.routing, block == routers_.front(), sums);
  if (losses != nullptr && block == routers_.back()) {
    ops_.routers->router_losses(shape_, sums, losses);
  }
}

template <class T>
auto Experts<T>::exchange_buffers() const -> ExchangeBuffers {
  const auto rows = [this](auto* at, std::size_t width) {
    return DeviceBytes(reinterpret_cast<std::byte*>(at), chunk_ * width * sizeof *at);
  };
  return {rows(sent_, width_),     rows(x_, width_), rows(dy_, width_),      rows(sums_, width_),
          rows(returned_, width_), rows(dots_, 1),   rows(returned_dots_, 1)};
}

template <class T>
void Experts<T>::compute_received(std::size_t block, const BlockWeights<T>& weights,
                                  std::size_t count) {
  if (count == 0) return;
  const std::size_t padded = pad(x_, count);
  compute(block, weights, padded);
  multiply_last(block, weights, count, padded);
}

template <class T>
void Experts<T>::differentiate_received(std::size_t block, const BlockWeights<T>& weights,
                                        std::size_t count) {
  if (count == 0) return;
  const std::size_t padded = pad(x_, count);
  pad(dy_, count);
  compute(block, weights, padded);
  differentiate(block, weights, padded);
  multiply_weights(block, weights, {nullptr, count, 1}, nullptr, dots_);
  differentiate_inputs(block, weights, padded);
}

template <class T>
void Experts<T>::add_returned(std::byte* rows, const std::vector<ExpertChoices>& choices,
                              float* sums) {
  const Rows at = rows_at(rows);
  by_experts(at, choices, [&](const ExpertRows& own, std::size_t first) {
    ops_.experts->add_rows(own, returned_ + first * width_, at.routing.weights, sums, width_);
  });
}

template <class T>
void Experts<T>::add_returned_gradients(std::byte* rows, const std::vector<ExpertChoices>& choices,
                                        float* sums) {
  const Rows at = rows_at(rows);
  by_experts(at, choices, [&](const ExpertRows& own, std::size_t first) {
    ops_.experts->add_rows(own, returned_ + first * width_, nullptr, sums, width_);
    ops_.experts->put_quotients(own, returned_dots_ + first, at.routing.weights,
                                at.routing.weight_gradients);
  });
}

template <class T>
void Experts<T>::shared_forward(std::size_t block, const BlockWeights<T>& weights, std::byte* rows,
                                float* sums) {
  const Rows at = rows_at(rows);
  weigh_all(block, weights, at);
  add_results(block, weights, at, gate_, {gate_shape().per_token, 0, shape_.rows}, sums);
}

template <class T>
void Experts<T>::shared_backward(std::size_t block, const BlockWeights<T>& weights, std::byte* rows,
                                 const T* dy, float* sums) {
  const Rows at = rows_at(rows);
  weigh_all(block, weights, at);
  ops_.elementwise->zero(gate_.weight_gradients, gate_shape().choices());
  add_gradients(block, weights, at, gate_, {gate_shape().per_token, 0, shape_.rows}, dy, sums);
  if (!gates_shared_) return;
  ops_.routers->router_gradient(gate_shape(), gate_, {}, {}, dlogits_);
  add_router_gradient(block, weights, at, gate_shape(), sums);
}

template <class T>
void Experts<T>::router_backward(std::size_t block, const BlockWeights<T>& weights, std::byte* rows,
                                 double* totals, float scale, float* sums) {
  const Rows at = rows_at(rows);
  const RouterLossScales scales = {losses_.balance * scale * static_cast<double>(shape_.experts),
                                   2.0 * losses_.z * scale};
  const RouterTotals sums_of_all =
      totals == nullptr ? RouterTotals() : RouterTotals::at(totals, shape_.experts);
  ops_.routers->router_gradient(shape_, at.routing, sums_of_all, scales, dlogits_);
  add_router_gradient(block, weights, at, shape_, sums);
}

template <class T>
auto Experts<T>::take_rows(Bump& bump) const -> Rows {
  Rows rows;
  rows.normed = bump.take<T>(shape_.rows * width_);
  rows.routing = Routing::take(bump, shape_);
  return rows;
}

template <class T>
void Experts<T>::bind_maps(const BlockSpec& block, const ExpertsSpec& spec,
                           const std::string& before, Bound& bound) const {
  bind_weights(block, spec, before, bound);
  if (block.content == BlockContent::expert) {
    const std::string stack = spec.name_in_class(spec.prefix);
    std::size_t column = 0;
    for (LinearAt& map : bound.in) {
      for (AdapterAt part : find_adapters(block, stack + std::string(kStackedGateUp))) {
        part.b += column * part.rank;
        part.out = map.out;
        map.adapters.push_back(part);
      }
      column += map.out;
    }
    for (const AdapterAt& at : find_adapters(block, stack + std::string(kStackedDown))) {
      bound.out.adapters.push_back(at);
    }
  }
  number_adapters(bound.in);
}

template <class T>
void Experts<T>::bind_weights(const BlockSpec& block, const ExpertsSpec& spec,
                              const std::string& before, Bound& bound) const {
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
  if (block.content == BlockContent::shared_expert && !spec.shared_in.empty()) {
    for (const std::string& name : spec.shared_in) {
      bound.in.push_back(find_linear(block, before + name));
    }
    if (ops_.traits.mlp.joins_gate_and_up) bound.in = joined(bound.in);
    bound.out = find_linear(block, before + spec.shared_out);
    return;
  }
  bound.in = {find_linear(block, before + spec.gate), find_linear(block, before + spec.up)};
  if (ops_.traits.mlp.joins_gate_and_up) bound.in = joined(bound.in);
  bound.out = find_linear(block, before + spec.down);
}

template <class T>
void Experts<T>::weigh_all(std::size_t block, const BlockWeights<T>& weights, const Rows& at) {
  const RouterShape shape = gate_shape();
  ops_.elementwise->zero(logits_, shape.rows * shape.step());
  if (gates_shared_) {
    ops_.products->multiply({shape.rows, 1, width_}, matrix(at.normed, width_),
                            transposed(weights[bound_[block].router].weight, width_),
                            matrix(logits_, shape.step()));
  }
  ops_.routers->route(shape, logits_, {}, nullptr, gate_, nullptr);
}

template <class T>
void Experts<T>::add_router_gradient(std::size_t block, const BlockWeights<T>& weights,
                                     const Rows& at, const RouterShape& shape, float* sums) {
  const LinearAt& router = bound_[block].router;
  const MapRows rows = {0, shape.rows};
  add_bias_gradient(ops_, weights[router], dlogits_, shape.step(), shape.rows);
  maps_.linear_weight(weights, router, at.normed, dlogits_, shape.step(), rows);
  maps_.linear_input(weights, router, dlogits_, shape.step(), sums, rows, true);
}

template <class T>
void Experts<T>::add_results(std::size_t block, const BlockWeights<T>& weights, const Rows& at,
                             const Routing& routing, const Choices& choices, float* sums) {
  by_chunks(routing, choices, [&](const ExpertRows& chunk, std::size_t padded) {
    ops_.experts->gather_rows(chunk, at.normed, nullptr, x_, padded, width_);
    compute(block, weights, padded);
    multiply_last(block, weights, chunk.count, padded);
    ops_.experts->add_rows(chunk, sums_, routing.weights, sums, width_);
  });
}

template <class T>
void Experts<T>::add_gradients(std::size_t block, BlockWeights<T> weights, const Rows& at,
                               const Routing& routing, const Choices& choices, const T* dy,
                               float* sums) {
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

template <class T>
void Experts<T>::collect(const Rows& at, const std::vector<ExpertChoices>& choices, const T* from,
                         const float* weights) {
  by_experts(at, choices, [&](const ExpertRows& own, std::size_t first) {
    ops_.experts->gather_rows(own, from, weights, sent_ + first * width_, own.count, width_);
  });
}

template <class T>
void Experts<T>::compute(std::size_t block, const BlockWeights<T>& weights, std::size_t padded) {
  const GateUp<T> pair = gate_up(block, padded);
  T* to = pair.gate;
  for (const LinearAt& part : bound_[block].in) {
    maps_.linear(weights, part, x_, to, pair.step, {0, padded});
    to = pair.up;
  }
  ops_.elementwise->glu(gating_, pair, activated_);
}

template <class T>
void Experts<T>::multiply_last(std::size_t block, const BlockWeights<T>& weights, std::size_t rows,
                               std::size_t padded) {
  const LinearAt& out = bound_[block].out;
  maps_.linear_sums(weights, out, activated_, sums_, width_, {0, padded});
  ops_.elementwise->add_bias(weights[out].bias, sums_, rows, width_);
}

template <class T>
void Experts<T>::differentiate(std::size_t block, const BlockWeights<T>& weights,
                               std::size_t padded) {
  const LinearAt& out = bound_[block].out;
  const MapRows rows = {0, padded};
  add_bias_gradient(ops_, weights[out], dy_, width_, padded);
  maps_.linear_weight(weights, out, activated_, dy_, width_, rows);
  maps_.linear_input(weights, out, dy_, width_, dactivated_, rows);
}

template <class T>
void Experts<T>::multiply_weights(std::size_t block, const BlockWeights<T>& weights,
                                  const ExpertRows& choices, const float* factors,
                                  float* gradients) {
  const Linear<T> out = weights[bound_[block].out];
  ops_.experts->dot_rows(choices, activated_, dactivated_, factors, gradients, out.in);
  if (out.bias == nullptr) return;
  ops_.experts->dot_bias(choices, out.bias, dy_, factors, gradients, width_);
}

template <class T>
void Experts<T>::differentiate_inputs(std::size_t block, const BlockWeights<T>& weights,
                                      std::size_t padded) {
  const GateUp<T> pair = gate_up(block, padded);
  ops_.elementwise->glu_backward(gating_, pair, dactivated_);
  const MapRows rows = {0, padded};
  const T* from = pair.gate;
  for (const LinearAt& part : bound_[block].in) {
    add_bias_gradient(ops_, weights[part], from, pair.step, padded);
    maps_.linear_weight(weights, part, x_, from, pair.step, rows);
    maps_.linear_input(weights, part, from, pair.step, sums_, rows, from != pair.gate);
    from = pair.up;
  }
}

template class Experts<float>;
template class Experts<Bf16>;
template class Experts<F16>;

}  // namespace ballast::model
