#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <optional>

#include "ballast/core/error.h"
#include "ballast/core/memory.h"
#include "ballast/model/attention.h"
#include "ballast/model/family.h"

#include "src/model/compute/adapted_maps.h"
#include "src/model/compute/kernel_arguments.h"
#include "src/model/compute/layer.h"
#include "src/model/compute/layer_memory.h"
#include "src/model/compute/tensor_offsets.h"
#include "src/model/description/families/decoder.h"

namespace ballast::model {

/// The part of a layer in sharing keys and values (Family::keys_of()).
struct SharedKeysAt {
  bool reads = false;  ///< reads keys and values of another layer
  bool gives = false;  ///< others read its keys and values
  bool last = false;   ///< no later layer reads the same keys and values
};

inline SharedKeysAt find_shared_keys(const ModelConfig& config, std::uint64_t layer) {
  const std::uint64_t source = family(config.family).keys_of(config, layer);
  const std::uint64_t last = last_reader_of_keys(config, source);
  return {source != layer, source == layer && last != layer, last == layer};
}

/// Moves keys and values between the rows of LayerMemory::qkv and the value that layers share,
/// which has them after norms and rotation. Gradients of all readers are summed in fp32 from the
/// last layer to the first, and rounded once when their layer adds its own.
template <class Ops>
class SharedKeys {
 public:
  using T = typename Ops::Value;

  explicit SharedKeys(Ops& ops) : ops_(ops) {}

  void forward(const AttentionShape& shape, const SharedKeysAt& at, const LayerLinks<T>& links,
               const LayerMemory<T>& m) {
    const std::size_t width = 2 * shape.kv_width();
    const Groups columns = {shape.tokens(), 1, width};
    T* const own = m.qkv + shape.width();
    if (at.reads) {
      ops_.heads->copy_groups(columns, links.keys_values, {width, 0}, own, {shape.row(), 0});
    } else if (at.gives && !links.backward) {
      ops_.heads->copy_groups(columns, own, {shape.row(), 0}, links.keys_values, {width, 0});
    }
  }
  /// Adds gradients in LayerMemory::dqkv to the sums, or the sums to them.
  void backward(const AttentionShape& shape, const SharedKeysAt& at, const LayerLinks<T>& links,
                const LayerMemory<T>& m) {
    if (links.keys_values_gradient == nullptr) return;
    const std::size_t width = 2 * shape.kv_width();
    T* const own = m.dqkv + shape.width();
    if (at.reads) {
      ops_.links->sum_columns(own, shape.row(), shape.tokens(), width, !at.last,
                              links.keys_values_gradient);
    } else if (at.gives) {
      ops_.links->add_sums(links.keys_values_gradient, shape.tokens(), width, own, shape.row());
    }
  }

 private:
  Ops& ops_;
};

/// Tensors of a LayerEmbeddingSpec in the block of a layer.
struct LayerEmbeddingAt {
  struct Projection {
    LinearAt map;
    NormAt norm;  ///< that of map(e) / sqrt(H): its epsilon is multiplied by H instead
  };
  std::size_t width = 0;
  std::size_t column = 0;  ///< first column of the layer among the inputs of all layers
  std::size_t rows = 0;    ///< rows of the table, which is in another block
  LinearAt gate;
  LinearAt out;
  NormAt norm;
  std::optional<Projection> projection;  ///< in the first layer
};

inline LayerEmbeddingAt find_layer_embedding(const BlockSpec& block, const LayerEmbeddingSpec& spec,
                                             const ModelConfig& config) {
  LayerEmbeddingAt at = {.width = spec.width,
                         .column = block.layer * spec.width,
                         .rows = spec.vocabulary,
                         .gate = find_linear(block, spec.gate),
                         .out = find_linear(block, spec.out),
                         .norm = find_norm(block, spec.norm)};
  if (block.layer > 0) return at;
  at.projection = {find_linear(block, spec.projection), find_norm(block, spec.projection_norm)};
  at.projection->norm.epsilon =
      static_cast<float>(config.norm_epsilon * static_cast<double>(config.hidden_size));
  return at;
}

/// Forward and backward passes of LayerEmbeddingSpec. Inputs of all layers have `row()` columns per
/// token.
template <class Ops>
class LayerEmbedding {
 public:
  using T = typename Ops::Value;

  /// `spec`: that of all layers; none if they have no inputs. `rows`: N. `chunk`: rows of an MLP
  /// that exist at a time.
  LayerEmbedding(const LayerEmbeddingSpec& spec, const ModelConfig& config, std::size_t rows,
                 std::size_t chunk, Ops& ops, AdaptedMaps<T>& maps)
      : width_(spec.width),
        all_(config.num_layers * spec.width),
        hidden_(config.hidden_size),
        rows_(rows),
        chunk_(chunk),
        ops_(ops),
        maps_(maps) {
    how_.scale =
        to_float(from_float<T>(static_cast<float>(std::sqrt(static_cast<double>(width_)))));
    how_.factor = static_cast<float>(1.0 / std::numbers::sqrt2);
  }

  /// Takes the memory for one call.
  void take_memory(Bump& bump) {
    if (width_ == 0) return;
    projected_ = bump.take<T>(rows_ * all_);
    gate_ = bump.take<T>(chunk_ * width_);
    input_ = bump.take<T>(chunk_ * width_);
    activated_ = bump.take<T>(chunk_ * width_);
    result_ = bump.take<T>(chunk_ * hidden_);
    stream_ = bump.take<T>(chunk_ * hidden_);
  }
  /// Memory [chunk, H] for the residual stream before forward(), in a backward pass.
  [[nodiscard]] T* stream() const { return stream_; }

  /// Writes the projected inputs of all layers [N, row()], in the first layer. `e` [N, H]: its
  /// input.
  void project(const BlockWeights<T>& block, const LayerEmbeddingAt& at, const T* e, T* inputs) {
    if (!at.projection) return;
    maps_.linear(block, at.projection->map, e, projected_, all_, {0, rows_});
    ops_.norms->norm_groups(block[at.projection->norm], groups(), projected_, all_, inputs, all_);
  }
  /// Backward pass of project(). Adds the gradient of e to `de`, and overwrites that of the inputs.
  void project_backward(const BlockWeights<T>& block, const LayerEmbeddingAt& at, const T* e,
                        T* inputs_gradient, T* de) {
    if (!at.projection || inputs_gradient == nullptr) return;
    const LinearAt& map = at.projection->map;
    const MapRows rows = {0, rows_};
    maps_.linear(block, map, e, projected_, all_, rows);
    ops_.norms->norm_groups_backward(block[at.projection->norm], groups(), projected_, all_,
                                     inputs_gradient, all_);
    maps_.linear_weight(block, map, e, inputs_gradient, all_, rows);
    maps_.linear_input(block, map, inputs_gradient, all_, de, rows, true);
  }

  /// Adds what the layer computes from its input to `rows` of the residual stream x, which begins
  /// at the first of them.
  void forward(const BlockWeights<T>& block, const LayerEmbeddingAt& at, const MapRows& rows,
               const LayerLinks<T>& links, T* x) {
    compute(block, at, rows, links, x);
    ops_.norms->norm(block[at.norm], result_, x, rows.count, x);
  }
  /// Backward pass of forward(), given the residual stream before it. Replaces the gradient dy of
  /// its result by that of x, and writes the layer's columns of `inputs_gradient` unless it is
  /// null.
  void backward(const BlockWeights<T>& block, const LayerEmbeddingAt& at, const MapRows& rows,
                const LayerLinks<T>& links, const T* x, T* dy) {
    compute(block, at, rows, links, x);
    ops_.norms->norm_backward(block[at.norm], result_, dy, nullptr, result_, rows.count);
    maps_.linear_weight(block, at.out, activated_, result_, hidden_, rows);
    maps_.linear_input(block, at.out, result_, hidden_, activated_, rows);
    ops_.elementwise->glu_backward({Activation::gelu_tanh}, pair(rows), activated_);
    T* const gradient =
        links.inputs_gradient == nullptr ? nullptr : columns(links.inputs_gradient, at, rows);
    float* const of_rows = links.table_rows_gradient == nullptr
                               ? nullptr
                               : links.table_rows_gradient + rows.first * width_;
    ops_.links->mix_rows_backward({input_, rows.count, width_}, how_, of_rows, gradient, all_);
    maps_.linear_weight(block, at.gate, x, gate_, width_, rows);
    maps_.linear_input(block, at.gate, gate_, width_, dy, rows, true);
  }

 private:
  [[nodiscard]] Groups groups() const { return {rows_, all_ / width_, width_}; }
  [[nodiscard]] GateUp<T> pair(const MapRows& rows) const {
    return {gate_, input_, width_, rows.count, width_};
  }
  template <class U>
  [[nodiscard]] U* columns(U* inputs, const LayerEmbeddingAt& at, const MapRows& rows) const {
    return inputs + rows.first * all_ + at.column;
  }
  /// Computes gate_, input_, activated_ and result_, the last map's result before its norm.
  void compute(const BlockWeights<T>& block, const LayerEmbeddingAt& at, const MapRows& rows,
               const LayerLinks<T>& links, const T* x) {
    maps_.linear(block, at.gate, x, gate_, width_, rows);
    ops_.links->mix_rows({links.table_rows + rows.first * width_, rows.count, width_}, how_,
                         columns(links.inputs, at, rows), all_, input_);
    ops_.elementwise->glu({Activation::gelu_tanh}, pair(rows), activated_);
    maps_.linear(block, at.out, activated_, result_, hidden_, rows);
  }

  std::size_t width_;
  std::size_t all_;  ///< columns of the inputs of all layers
  std::size_t hidden_;
  std::size_t rows_;
  std::size_t chunk_;
  TokenMix how_;
  Ops& ops_;
  AdaptedMaps<T>& maps_;
  T* projected_ = nullptr;  ///< [N, row()] before its norm
  T* gate_ = nullptr;       ///< [chunk, width] before the activation, later its gradient
  T* input_ = nullptr;      ///< [chunk, width], later its gradient
  T* activated_ = nullptr;  ///< [chunk, width], later its gradient
  T* result_ = nullptr;     ///< [chunk, H], later its gradient
  T* stream_ = nullptr;     ///< [chunk, H]
};

}  // namespace ballast::model
