#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "ballast/core/bump.h"
#include "ballast/model/attention.h"

#include "src/model/compute/layer.h"
#include "src/model/compute/layer_memory.h"

namespace ballast::model {

/// Norms of heads of values, whose weights are 1. LayerMemory::projected has the values after
/// queries and keys, or the keys are values.
template <class Ops>
class ValueNorms {
 public:
  using T = typename Ops::Value;

  /// `shapes`: those of all layers.
  ValueNorms(const std::vector<AttentionShape>& shapes, Ops& ops) : ops_(ops) {
    for (const AttentionShape& shape : shapes) widest_ = std::max(widest_, shape.head_dim);
  }

  /// Takes memory that lasts between calls.
  void take_memory(Bump& bump) {
    zeros_ = bump.take<float>(widest_);
    zeroed_ = false;
  }
  /// Writes the values in m.qkv.
  void forward(const AttentionShape& shape, bool keys_are_values, const LayerMemory<T>& m) {
    ops_.norm_groups(norm(), heads(shape), m.projected + before(shape, keys_are_values), row(shape),
                     m.qkv + shape.width() + shape.kv_width(), shape.row());
  }
  /// Turns the gradient of the values in m.dqkv into that of the values before the norm, which is
  /// added to the gradient of the keys before their norm if keys are values.
  void backward(const AttentionShape& shape, bool keys_are_values, const LayerMemory<T>& m) {
    T* const dkeys = m.dqkv + shape.width();
    ops_.norm_groups_backward(norm(), heads(shape), m.projected + before(shape, keys_are_values),
                              row(shape), dkeys + shape.kv_width(), shape.row());
    if (!keys_are_values) return;
    ops_.sum_groups({shape.tokens(), 2, shape.kv_width()}, dkeys, {shape.row(), shape.kv_width()},
                    dkeys, shape.row());
  }

 private:
  /// The weights are an offset of 1 plus zeros.
  Norm<T> norm() {
    if (!zeroed_) ops_.zero(zeros_, widest_);
    zeroed_ = true;
    return {.weight = reinterpret_cast<const T*>(zeros_), .offset = 1.0F};
  }
  [[nodiscard]] static Groups heads(const AttentionShape& shape) {
    return {shape.tokens(), shape.kv_heads, shape.head_dim};
  }
  /// Row length of LayerMemory::projected, and the columns before the values.
  [[nodiscard]] static std::size_t row(const AttentionShape& shape) { return shape.row(); }
  [[nodiscard]] static std::size_t before(const AttentionShape& shape, bool keys_are_values) {
    return shape.width() + (keys_are_values ? 0 : shape.kv_width());
  }

  Ops& ops_;
  std::size_t widest_ = 0;  ///< width of the widest head
  float* zeros_ = nullptr;  ///< [widest]
  bool zeroed_ = false;
};

}  // namespace ballast::model
