#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ballast/core/memory.h"
#include "ballast/core/units.h"
#include "ballast/model/architecture.h"
#include "ballast/model/attention.h"

#include "src/model/compute/adapted_maps.h"
#include "src/model/compute/kernel_arguments.h"
#include "src/model/compute/layer.h"
#include "src/model/compute/layer_memory.h"
#include "src/model/compute/tensor_offsets.h"
#include "src/model/description/families/decoder.h"

namespace ballast::model {

/// Tensors of a DeltaSpec in a block.
struct DeltaAt {
  std::vector<LinearAt> maps;  ///< their input is the layer's, their outputs are side by side
  /// The convolution's weights. A tile has three ranges: channels of queries, keys and values.
  std::vector<ElementRange> convolution;
  Elems decay = 0;
  Elems shift = 0;
  NormAt norm;               ///< in a tile: offsets in the weights of HeadNorms
  bool by_key_head = false;  ///< see DeltaSpec
};

/// Finds the tensors of `spec` whose inputs are `maps`.
inline DeltaAt find_delta(const BlockSpec& block, const DeltaSpec& spec,
                          const std::vector<LinearAt>& maps) {
  const bool tile = block.content == BlockContent::attention;
  DeltaAt at = {.maps = joined(maps),
                .decay = block.tensor(spec.decay).offset,
                .shift = block.tensor(spec.shift).offset,
                .norm = tile ? NormAt() : find_norm(block, spec.norm),
                .by_key_head = spec.by_key_head};
  const std::string& convolution = block.tensor(spec.convolution + ".weight").name;
  for (const TensorSpec& tensor : block.tensors) {
    if (tensor.name != convolution) continue;
    at.convolution.push_back({tensor.offset, tensor.offset + tensor.size});
  }
  number_adapters(at.maps);
  return at;
}

/// Returns the extents of the gated delta nets of a model for a micro-batch, if it has any.
inline DeltaShape delta_shape(const ModelConfig& config, const AttentionShape& attention) {
  const auto* const described = dynamic_cast<const DecoderFamily*>(&family(config.family));
  for (std::uint64_t layer = 0; described != nullptr && layer < config.num_layers; ++layer) {
    const DeltaSpec spec = described->decoder(config, layer).delta;
    if (spec.key_heads == 0) continue;
    return {.sequences = attention.sequences,
            .length = attention.length,
            .key_heads = spec.key_heads,
            .value_heads = spec.value_heads,
            .key_width = spec.key_width,
            .value_width = spec.value_width,
            .taps = spec.taps};
  }
  return {};
}

/// Forward and backward passes of a gated delta net (DeltaSpec), between the layer's normed input
/// and the last map.
template <class Ops>
class DeltaNet {
 public:
  using T = typename Ops::Value;
  /// `tiles`: whether layers are cut into tiles.
  DeltaNet(const DeltaShape& shape, bool tiles, Ops& ops, AdaptedMaps<T>& maps)
      : shape_(shape),
        joined_taps_(tiles ? shape.channels() * shape.taps : 0),
        ops_(ops),
        maps_(maps) {}

  /// Takes the memory for one call.
  void take_memory(Bump& bump) {
    scratch_ = bump.take<std::byte>(ops_.mixers->scratch_bytes());
    taps_ = bump.take<T>(joined_taps_);
    taps_gradient_ = bump.take<float>(joined_taps_);
  }

  /// x [N, H] -> mixed, the rows of DeltaShape.
  void project(const BlockWeights<T>& block, const DeltaAt& at, const T* x,
               const LayerMemory<T>& m) {
    T* const first = at.by_key_head ? m.dqkv : m.mixed;
    T* to = first;
    for (const LinearAt& map : at.maps) {
      maps_.linear(block, map, x, to, shape_.row(), rows());
      to += map.out;
    }
    if (!at.by_key_head) return;
    for_parts(
        [&](const Groups& heads, T* by_head, const GroupSteps& by_head_steps, T* apart,
            const GroupSteps& apart_steps) {
          ops_.heads->copy_groups(heads, by_head, by_head_steps, apart, apart_steps);
        },
        first, m.mixed);
  }
  /// mixed -> channels.
  void convolve(const BlockWeights<T>& block, const DeltaAt& at, const std::int32_t* positions,
                const LayerMemory<T>& m) {
    ops_.mixers->convolve(convolution(block, at, positions), m.mixed, m.channels, scratch_);
  }
  /// channels -> recurred and states.
  void recur(const BlockWeights<T>& block, const DeltaAt& at, const std::int32_t* positions,
             const LayerMemory<T>& m) {
    ops_.mixers->recur(inputs(block, at, positions, m), m.recurred, m.states, scratch_);
  }
  /// Returns the input of the last map [N, values()], in the memory of m.dqkv.
  const T* results(const Norm<T>& norm, const LayerMemory<T>& m) {
    ops_.mixers->gated_norm(norm, m.recurred, gates(m.mixed), m.dqkv);
    return m.dqkv;
  }
  /// m.gradient, that of results() -> gradients of the weights, and of x in `dx`, which is written
  /// or added to and may be m.gradient.
  template <class D>
  void backward(const BlockWeights<T>& block, const DeltaAt& at, const Norm<T>& norm, const T* x,
                const std::int32_t* positions, const LayerMemory<T>& m, D* dx, bool add_to_dx) {
    T* const d = m.dqkv;
    const std::size_t row = shape_.row();
    auto& mixers = *ops_.mixers;
    mixers.gated_norm_backward(norm, m.recurred, gates(m.mixed), m.gradient, gates(d), scratch_);
    mixers.recur_backward(inputs(block, at, positions, m), m.states, m.gradient,
                          {d, d + shape_.betas_at(), row, vector(block, at.decay).weight_gradient,
                           vector(block, at.shift).weight_gradient},
                          scratch_);
    convolve_backward(block, at, positions, m.mixed, d);
    if (at.by_key_head) {
      for_parts(
          [&](const Groups& heads, T* by_head, const GroupSteps& by_head_steps, T* apart,
              const GroupSteps& apart_steps) {
            ops_.heads->copy_groups(heads, apart, apart_steps, by_head, by_head_steps);
          },
          m.mixed, d);
    }
    const T* const first = at.by_key_head ? m.mixed : d;
    const T* from = first;
    for (const LinearAt& map : at.maps) {
      maps_.linear_weight(block, map, x, from, row, rows());
      maps_.linear_input(block, map, from, row, dx, rows(), from != first || add_to_dx);
      from += map.out;
    }
  }

 private:
  /// Calls copy(heads, place in `by_head` and its steps, place in `apart` and its steps) for
  /// queries, keys, values, gates, `b` and `a`. Both are rows of DeltaShape, `by_head` in the order
  /// of DeltaSpec::by_key_head.
  template <class Copy>
  void for_parts(const Copy& copy, T* by_head, T* apart) const {
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
  static Norm<T> vector(const BlockWeights<T>& block, Elems offset) {
    return block[NormAt{.weight = offset}];
  }
  /// Copies weights in several ranges to one array.
  Convolution<T> convolution(const BlockWeights<T>& block, const DeltaAt& at,
                             const std::int32_t* positions) {
    const Norm<T> first = vector(block, at.convolution.front().first);
    if (at.convolution.size() == 1) return {first.weight, first.weight_gradient, positions};
    T* to = taps_;
    for (const ElementRange& range : at.convolution) {
      ops_.elementwise->copy_bytes(
          reinterpret_cast<const std::byte*>(vector(block, range.first).weight),
          reinterpret_cast<std::byte*>(to), range.count() * sizeof(T));
      to += range.count();
    }
    return {taps_, first.weight_gradient == nullptr ? nullptr : taps_gradient_, positions};
  }
  /// Replaces `d` by the gradient of the channels `x`.
  void convolve_backward(const BlockWeights<T>& block, const DeltaAt& at,
                         const std::int32_t* positions, const T* x, T* d) {
    const Convolution<T> how = convolution(block, at, positions);
    const bool joins = how.weight_gradient != nullptr && how.weight_gradient == taps_gradient_;
    if (joins) ops_.elementwise->zero(taps_gradient_, joined_taps_);
    ops_.mixers->convolve_backward(how, x, d, scratch_);
    if (!joins) return;
    const float* from = taps_gradient_;
    for (const ElementRange& range : at.convolution) {
      ops_.elementwise->accumulate(from, vector(block, range.first).weight_gradient, range.count());
      from += range.count();
    }
  }
  DeltaInputs<T> inputs(const BlockWeights<T>& block, const DeltaAt& at,
                        const std::int32_t* positions, const LayerMemory<T>& m) const {
    return {m.channels,
            m.mixed + shape_.betas_at(),
            shape_.row(),
            vector(block, at.decay).weight,
            vector(block, at.shift).weight,
            positions};
  }
  template <class U>
  U* gates(U* row) const {
    return row + shape_.gates_at();
  }
  [[nodiscard]] MapRows rows() const { return {0, shape_.tokens()}; }

  DeltaShape shape_;
  std::size_t joined_taps_;  ///< weights of a tile's convolution; 0: layers are whole
  Ops& ops_;
  AdaptedMaps<T>& maps_;
  std::byte* scratch_ = nullptr;
  T* taps_ = nullptr;               ///< [channels, taps] of a tile, which has them in three ranges
  float* taps_gradient_ = nullptr;  ///< like taps_
};

/// Multiplies the results of attention by the sigmoids of a gate (DecoderSpec::output_gate), which
/// the map of the queries computes after them.
template <class Ops>
class AttentionGate {
 public:
  using T = typename Ops::Value;
  AttentionGate(const AttentionShape& shape, Ops& ops) : shape_(shape), ops_(ops) {}

  /// Row length of LayerMemory::projected: queries, gates, keys.
  [[nodiscard]] std::size_t row() const { return 2 * shape_.width() + shape_.kv_width(); }
  /// Returns the input of the last map, in the memory of m.dqkv.
  const T* results(const LayerMemory<T>& m) {
    ops_.mixers->output_gate(m.attention, m.projected + shape_.width(), row(), m.dqkv,
                             shape_.tokens(), shape_.width());
    return m.dqkv;
  }
  /// Turns m.gradient from that of results() into that of attention, and the gates into their
  /// gradients.
  void backward(const LayerMemory<T>& m) {
    ops_.mixers->output_gate_backward(m.attention, m.projected + shape_.width(), row(), m.gradient,
                                      shape_.tokens(), shape_.width());
  }
  /// Copies the gradients of the queries from m.dqkv next to those of the gates. Returns the
  /// gradient of the queries' map, with rows row() apart.
  const T* query_gradient(const LayerMemory<T>& m) {
    ops_.heads->copy_groups({shape_.tokens(), 1, shape_.width()}, m.dqkv, {shape_.row(), 0},
                            m.projected, {row(), 0});
    return m.projected;
  }

 private:
  AttentionShape shape_;
  Ops& ops_;
};

}  // namespace ballast::model
