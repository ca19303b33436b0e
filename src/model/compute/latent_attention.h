#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "ballast/model/architecture.h"

#include "src/model/compute/adapted_maps.h"
#include "src/model/compute/layer.h"
#include "src/model/compute/layer_memory.h"
#include "src/model/compute/tensor_offsets.h"
#include "src/model/description/families/decoder.h"

namespace ballast::model {

/// Tensors of a LatentSpec in a block, and its widths.
struct LatentAt {
  std::optional<LinearAt> query_down;
  NormAt query_norm;  ///< only with query_down
  LinearAt query;
  LinearAt down;
  NormAt norm;
  LinearAt up;
  std::size_t plain = 0;
  std::size_t rotating = 0;
  std::size_t values = 0;

  [[nodiscard]] std::size_t rank() const { return up.in; }
};

/// Finds the tensors of `spec`, whose queries are the map `query`.
inline LatentAt find_latent(const BlockSpec& block, const LatentSpec& spec, const LinearAt& query) {
  const auto norm = [&](const std::string& name) {
    NormAt at = find_norm(block, name);
    at.epsilon = static_cast<float>(spec.epsilon);
    return at;
  };
  LatentAt at = {.query = query,
                 .down = find_linear(block, spec.down),
                 .norm = norm(spec.norm),
                 .up = find_linear(block, spec.up),
                 .plain = spec.plain,
                 .rotating = spec.rotating,
                 .values = spec.values};
  // Adapters of the two maps of the layer's input are numbered together.
  if (spec.query_rank > 0) {
    at.query_down = find_linear(block, spec.query_down);
    at.query_norm = norm(spec.query_norm);
  }
  std::vector<LinearAt> same_input = {at.query_down ? *at.query_down : at.query, at.down};
  number_adapters(same_input);
  (at.query_down ? *at.query_down : at.query) = same_input.front();
  at.down = same_input.back();
  return at;
}

/// Forward and backward passes of the maps of a LatentSpec, between the layer's input and queries,
/// keys and values before rotation. Matrices have one width of heads, so heads of values are padded
/// with zeros to the width of the keys, and so are their results (AttentionShape::value_dim).
template <class Ops>
class LatentAttention {
 public:
  using T = typename Ops::Value;
  LatentAttention(const AttentionShape& shape, Ops& ops, AdaptedMaps<T>& maps)
      : shape_(shape), ops_(ops), maps_(maps) {}

  /// x [N, H] -> qkv. Overwrites `gradient`.
  void project(const BlockWeights<T>& block, const LatentAt& at, const T* x,
               const LayerMemory<T>& m) {
    const T* read = x;
    if (at.query_down) {
      const std::size_t rank = at.query_down->out;
      maps_.linear(block, *at.query_down, x, m.low_queries, rank, rows());
      ops_.norms->norm_groups(block[at.query_norm], whole(rank), m.low_queries, rank,
                              m.low_queries_normed, rank);
      read = m.low_queries_normed;
    }
    maps_.linear(block, at.query, read, m.qkv, shape_.row(), rows());
    maps_.linear(block, at.down, x, m.low, at.down.out, rows());
    ops_.norms->norm_groups(block[at.norm], whole(at.rank()), m.low, at.down.out, m.low_normed,
                            at.rank());
    T* const expanded = m.gradient;
    maps_.linear(block, at.up, m.low_normed, expanded, at.up.out, rows());
    ops_.heads->copy_groups(heads(at.plain), expanded, in_expanded(at), keys(m.qkv), in_row());
    ops_.heads->copy_groups(heads(at.rotating), m.low + at.rank(), {at.down.out, 0},
                            keys(m.qkv) + at.plain, in_row());
    ops_.heads->copy_groups(heads(at.values), expanded + at.plain, in_expanded(at), values(m.qkv),
                            in_row(), padding(at));
  }

  /// m.dqkv, rotated back -> gradients of the weights, and of x in `dx`, which is written or added
  /// to and may be `gradient`.
  template <class D>
  void backward(const BlockWeights<T>& block, const LatentAt& at, const T* x,
                const LayerMemory<T>& m, D* dx, bool add_to_dx) {
    T* const expanded = m.gradient;
    ops_.heads->copy_groups(heads(at.plain), keys(m.dqkv), in_row(), expanded, in_expanded(at));
    ops_.heads->copy_groups(heads(at.values), values(m.dqkv), in_row(), expanded + at.plain,
                            in_expanded(at));
    maps_.linear_weight(block, at.up, m.low_normed, expanded, at.up.out, rows());
    maps_.linear_input(block, at.up, expanded, at.up.out, m.low_normed, rows());
    ops_.norms->norm_groups_backward(block[at.norm], whole(at.rank()), m.low, at.down.out,
                                     m.low_normed, at.rank());
    ops_.heads->copy_groups(whole(at.rank()), m.low_normed, {at.rank(), 0}, m.low,
                            {at.down.out, 0});
    ops_.heads->sum_groups(heads(at.rotating), keys(m.dqkv) + at.plain, in_row(), m.low + at.rank(),
                           at.down.out);
    query_backward(block, at, x, m, dx, add_to_dx);
    add_bias_gradient(ops_, block[at.down], m.low, at.down.out, rows().count);
    maps_.linear_weight(block, at.down, x, m.low, at.down.out, rows());
    maps_.linear_input(block, at.down, m.low, at.down.out, dx, rows(), true);
  }

  /// Returns the input of the map after attention [N, heads x values]. It may overwrite m.dqkv.
  const T* results(const LatentAt& at, const LayerMemory<T>& m) {
    if (padding(at) == 0) return m.attention;
    ops_.heads->copy_groups(heads(at.values), m.attention, in_results(), m.dqkv, in_packed(at));
    return m.dqkv;
  }
  /// Returns where to write the gradient of results().
  T* results_gradient(const LatentAt& at, const LayerMemory<T>& m) const {
    return padding(at) == 0 ? m.gradient : m.dqkv;
  }
  /// Turns it into that of `attention` in m.gradient.
  void pad_results_gradient(const LatentAt& at, const LayerMemory<T>& m) {
    if (padding(at) == 0) return;
    ops_.heads->copy_groups(heads(at.values), m.dqkv, in_packed(at), m.gradient, in_results(),
                            padding(at));
  }

 private:
  template <class D>
  void query_backward(const BlockWeights<T>& block, const LatentAt& at, const T* x,
                      const LayerMemory<T>& m, D* dx, bool add_to_dx) {
    const std::size_t row = shape_.row();
    if (!at.query_down) {
      maps_.linear_weight(block, at.query, x, m.dqkv, row, rows());
      maps_.linear_input(block, at.query, m.dqkv, row, dx, rows(), add_to_dx);
      return;
    }
    const LinearAt& down = *at.query_down;
    maps_.linear_weight(block, at.query, m.low_queries_normed, m.dqkv, row, rows());
    maps_.linear_input(block, at.query, m.dqkv, row, m.low_queries_normed, rows());
    ops_.norms->norm_groups_backward(block[at.query_norm], whole(down.out), m.low_queries, down.out,
                                     m.low_queries_normed, down.out);
    add_bias_gradient(ops_, block[down], m.low_queries_normed, down.out, rows().count);
    maps_.linear_weight(block, down, x, m.low_queries_normed, down.out, rows());
    maps_.linear_input(block, down, m.low_queries_normed, down.out, dx, rows(), add_to_dx);
  }

  [[nodiscard]] MapRows rows() const { return {0, shape_.tokens()}; }
  /// One group of the first `width` columns.
  [[nodiscard]] Groups whole(std::size_t width) const { return {shape_.tokens(), 1, width}; }
  [[nodiscard]] Groups heads(std::size_t width) const {
    return {shape_.tokens(), shape_.heads, width};
  }
  [[nodiscard]] T* keys(T* qkv) const { return qkv + shape_.width(); }
  [[nodiscard]] T* values(T* qkv) const { return qkv + 2 * shape_.width(); }
  [[nodiscard]] GroupSteps in_row() const { return {shape_.row(), shape_.head_dim}; }
  [[nodiscard]] GroupSteps in_results() const { return {shape_.width(), shape_.head_dim}; }
  [[nodiscard]] GroupSteps in_packed(const LatentAt& at) const {
    return {shape_.heads * at.values, at.values};
  }
  [[nodiscard]] static GroupSteps in_expanded(const LatentAt& at) {
    return {at.up.out, at.plain + at.values};
  }
  [[nodiscard]] std::size_t padding(const LatentAt& at) const {
    return shape_.head_dim - at.values;
  }

  AttentionShape shape_;
  Ops& ops_;
  AdaptedMaps<T>& maps_;
};

}  // namespace ballast::model
