#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <type_traits>

#include "ballast/core/bump.h"
#include "ballast/core/error.h"
#include "ballast/model/architecture.h"

#include "src/model/dropout.h"
#include "src/model/layer.h"

namespace ballast::model {

/// Rows of a micro-batch that a linear map reads.
struct MapRows {
  std::size_t first = 0;
  std::size_t count = 0;
};

/// The products of linear maps with their adapters: y = W x + s B h with h = A x, forward and
/// backward. The backward pass computes h again, since that is cheaper than to keep it. A map may
/// have several adapters, of the parts of its outputs (joined()). `Ops`: layer.h.
template <class Ops>
class AdaptedMaps {
 public:
  using T = typename Ops::Value;

  AdaptedMaps(const Architecture& model, Ops& ops) : ops_(ops) {
    if (!model.adapters) return;
    rank_ = model.adapters->rank;
    scale_ = static_cast<float>(model.adapters->scale());
    dropout_ = model.adapters->dropout;
  }

  /// Memory of one call: for `rows` rows, of which a map reads at most `values` values.
  void take_memory(Bump& bump, std::size_t rows, std::size_t values) {
    if (rank_ == 0) return;
    h_ = bump.take<T>(rows * rank_);
    for (T*& gradient : dh_) gradient = bump.take<T>(rows * rank_);
    if (dropout_ > 0.0) dropped_ = bump.take<T>(values);
  }

  /// As the operations of the same names.
  void linear(const BlockWeights<T>& block, const LinearAt& map, const T* x, T* y,
              std::size_t y_row, const MapRows& rows) {
    ops_.linear(block[map], x, y, y_row, rows.count);
    add_adapters(block, map, x, y, y_row, rows);
  }
  void linear_onto(const BlockWeights<T>& block, const LinearAt& map, const T* x, const T* residual,
                   T* y, const MapRows& rows) {
    ops_.linear_onto(block[map], x, residual, y, rows.count);
    add_adapters(block, map, x, y, map.out, rows);
  }
  /// Also what linear_input() of the same map needs, until linear_weight() of another input.
  void linear_weight(const BlockWeights<T>& block, const LinearAt& map, const T* x, const T* dy,
                     std::size_t dy_row, const MapRows& rows) {
    ops_.linear_weight(block[map], x, dy, dy_row, rows.count);
    for (const AdapterAt& at : map.adapters) {
      const Linear<T> b = block[second(at)];
      const T* const read = compute_h(block, at, map.in, x, rows);
      T* const dh = dh_.at(at.number);
      ops_.linear_weight(b, h_, dy + at.column, dy_row, rows.count);
      ops_.linear_input(b, dy + at.column, dy_row, dh, rows.count);
      ops_.scale(dh, scale_, rows.count * rank_);
      ops_.linear_weight(block[first(at, map.in)], read, dh, rank_, rows.count);
    }
  }
  template <class D>
  void linear_input(const BlockWeights<T>& block, const LinearAt& map, const T* dy,
                    std::size_t dy_row, D* dx, const MapRows& rows, bool add_to_dx = false) {
    ops_.linear_input(block[map], dy, dy_row, dx, rows.count, add_to_dx);
    if (map.adapters.empty()) return;
    if constexpr (std::is_same_v<D, T>) {
      for (const AdapterAt& at : map.adapters) {
        const Linear<T> a = block[first(at, map.in)];
        const T* const dh = dh_.at(at.number);
        if (!drops(block)) {
          ops_.linear_input(a, dh, rank_, dx, rows.count, true);
          continue;
        }
        ops_.linear_input(a, dh, rank_, dropped_, rows.count);
        ops_.drop(mask(block, at, map.in, rows), dropped_, dx, rows.count * map.in, true);
      }
    } else {
      throw Error(ErrorCategory::state, "tiles of layers have no adapters");
    }
  }

 private:
  [[nodiscard]] LinearAt first(const AdapterAt& at, std::size_t in) const {
    return {.weight = at.a, .in = in, .out = rank_, .flipped = true};
  }
  [[nodiscard]] LinearAt second(const AdapterAt& at) const {
    return {.weight = at.b, .in = rank_, .out = at.out, .flipped = true};
  }
  [[nodiscard]] bool drops(const BlockWeights<T>& block) const {
    return dropout_ > 0.0 && block.dropout.on;
  }
  [[nodiscard]] DropoutMask mask(const BlockWeights<T>& block, const AdapterAt& at, std::size_t in,
                                 const MapRows& rows) const {
    return DropoutMask::of(dropout_, block.dropout.key, at.stream, rows.first * in);
  }

  /// h_ = s A x, with dropout; returns what A reads.
  const T* compute_h(const BlockWeights<T>& block, const AdapterAt& at, std::size_t in, const T* x,
                     const MapRows& rows) {
    const T* read = x;
    if (drops(block)) {
      ops_.drop(mask(block, at, in, rows), x, dropped_, rows.count * in, false);
      read = dropped_;
    }
    ops_.linear(block[first(at, in)], read, h_, rank_, rows.count);
    ops_.scale(h_, scale_, rows.count * rank_);
    return read;
  }
  void add_adapters(const BlockWeights<T>& block, const LinearAt& map, const T* x, T* y,
                    std::size_t y_row, const MapRows& rows) {
    if (block.subject == Subject::reference) return;
    for (const AdapterAt& at : map.adapters) {
      compute_h(block, at, map.in, x, rows);
      const Product p = forward_product(block[second(at)], h_, y + at.column, y_row, rows.count);
      ops_.multiply(p.extents, p.a, p.b, p.c, true);
    }
  }

  Ops& ops_;
  std::size_t rank_ = 0;  ///< 0: the model has no adapters
  float scale_ = 1.0F;
  double dropout_ = 0.0;
  T* h_ = nullptr;             ///< [rows, rank]
  std::array<T*, 3> dh_ = {};  ///< likewise, the gradients of A x of maps with the same input
  T* dropped_ = nullptr;       ///< what A reads, or its gradient
};

}  // namespace ballast::model
