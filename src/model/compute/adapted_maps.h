#pragma once

#include <algorithm>
#include <cstddef>
#include <type_traits>
#include <vector>

#include "ballast/core/error.h"
#include "ballast/core/memory.h"
#include "ballast/model/architecture.h"

#include "src/model/compute/kernel_arguments.h"
#include "src/model/compute/layer_arguments.h"

namespace ballast::model {

/// Rows of a micro-batch that a linear map reads.
struct MapRows {
  std::size_t first = 0;
  std::size_t count = 0;
};

/// Forward and backward products of linear maps with their adapters: y = W x + s B h with h = A x.
/// The backward pass recomputes h, which is cheaper than keeping it. A map may have several
/// adapters, each for a part of its outputs (joined()).
///
/// With magnitudes (DoRA): y = g (W x + s B h) + bias. The backward pass recomputes the sum and the
/// scales g; nothing of them is kept.
template <class T>
class AdaptedMaps {
 public:
  AdaptedMaps(const Architecture& model, DeviceOps<T>& ops) : ops_(ops) {
    if (!model.adapters) return;
    dropout_ = model.adapters->dropout;
    dora_ = model.adapters->dora;
  }

  /// Largest extents of the maps that one call may get.
  struct Most {
    std::size_t rows = 0;
    std::size_t values = 0;    ///< inputs
    std::size_t results = 0;   ///< outputs of all rows
    std::size_t outputs = 0;   ///< outputs of one row
    std::size_t adapters = 3;  ///< number for maps with the same input
    std::size_t rank = 0;      ///< 0: no map has adapters

    void add(const LinearAt& map, std::size_t count) {
      rows = std::max(rows, count);
      values = std::max(values, count * map.in);
      results = std::max(results, count * map.out);
      outputs = std::max(outputs, map.out);
      for (const AdapterAt& at : map.adapters) {
        adapters = std::max(adapters, at.number + 1);
        rank = std::max(rank, at.rank);
      }
    }
  };
  /// Takes the memory for one call.
  void take_memory(Bump& bump, const Most& most) {
    if (most.rank == 0) return;
    h_ = bump.take<T>(most.rows * most.rank);
    dh_.resize(most.adapters);
    for (T*& gradient : dh_) gradient = bump.take<T>(most.rows * most.rank);
    if (dropout_ > 0.0) dropped_ = bump.take<T>(most.values);
    if (!dora_) return;
    results_ = bump.take<T>(most.results);
    cross_ = bump.take<float>(most.outputs * most.rank);
    gram_ = bump.take<float>(most.rank * most.rank);
    inverse_norms_ = bump.take<float>(most.outputs);
    dora_scales_.resize(most.adapters);
    for (float*& scales : dora_scales_) scales = bump.take<float>(most.outputs);
  }

  /// Like the operations of the same names, including the adapters.
  void linear(const BlockWeights<T>& block, const LinearAt& map, const T* x, T* y,
              std::size_t y_row, const MapRows& rows) {
    if (block.role == ModelRole::reference) {
      return ops_.products->linear(block[map], x, y, y_row, rows.count);
    }
    ops_.products->linear(inner(block, map), x, y, y_row, rows.count);
    add_adapters(block, map, x, y, y_row, rows);
    scale_results(block, map, nullptr, y, y_row, rows);
  }
  void linear_onto(const BlockWeights<T>& block, const LinearAt& map, const T* x, const T* residual,
                   T* y, const MapRows& rows) {
    if (block.role == ModelRole::reference) {
      return ops_.products->linear_onto(block[map], x, residual, y, rows.count);
    }
    if (has_dora(map)) {
      ops_.products->linear(inner(block, map), x, y, map.out, rows.count);
    } else {
      ops_.products->linear_onto(block[map], x, residual, y, rows.count);
    }
    add_adapters(block, map, x, y, map.out, rows);
    scale_results(block, map, residual, y, map.out, rows);
  }
  /// y = W x + s B h in fp32, without the bias, for maps without magnitudes and dropout.
  void linear_sums(const BlockWeights<T>& block, const LinearAt& map, const T* x, float* y,
                   std::size_t y_row, const MapRows& rows) {
    const Product p = forward_product(block[map], x, y, y_row, rows.count);
    ops_.products->multiply(p.extents, p.a, p.b, p.c);
    expects(map.adapters.empty() || (!dora_ && dropout_ == 0.0), "sums have plain adapters");
    if (block.role == ModelRole::policy) add_adapters(block, map, x, y, y_row, rows);
  }
  /// Also prepares what linear_input() of the same map needs, until linear_weight() of another
  /// input.
  void linear_weight(const BlockWeights<T>& block, const LinearAt& map, const T* x, const T* dy,
                     std::size_t dy_row, const MapRows& rows) {
    ops_.products->linear_weight(block[map], x, dy, dy_row, rows.count);
    for (const AdapterAt& at : map.adapters) {
      const Linear<T> b = block[second(at)];
      const T* const read = compute_h(block, at, map.in, x, rows);
      T* const dh = dh_.at(at.number);
      const T* dsum = dy + at.column;
      std::size_t dsum_row = dy_row;
      if (at.magnitudes) {
        dsum = differentiate_dora(block, map, at, x, dsum, dy_row, rows);
        dsum_row = at.out;
      }
      ops_.products->linear_weight(b, h_, dsum, dsum_row, rows.count);
      ops_.products->linear_input(b, dsum, dsum_row, dh, rows.count);
      ops_.elementwise->scale(dh, at.scale, rows.count * at.rank);
      ops_.products->linear_weight(block[first(at, map.in)], read, dh, at.rank, rows.count);
    }
  }
  template <class D>
  void linear_input(const BlockWeights<T>& block, const LinearAt& map, const T* dy,
                    std::size_t dy_row, D* dx, const MapRows& rows, bool add_to_dx = false) {
    if (has_dora(map)) {
      dy = gradient_of_sums(map, dy, dy_row, rows);
      dy_row = map.out;
    }
    if constexpr (std::is_same_v<D, T>) {
      ops_.products->linear_input(block[map], dy, dy_row, dx, rows.count, add_to_dx);
      for (const AdapterAt& at : map.adapters) {
        const Linear<T> a = block[first(at, map.in)];
        const T* const dh = dh_.at(at.number);
        if (!drops(block)) {
          ops_.products->linear_input(a, dh, at.rank, dx, rows.count, true);
          continue;
        }
        ops_.products->linear_input(a, dh, at.rank, dropped_, rows.count);
        ops_.elementwise->drop(mask(block, at, map.in, rows), dropped_, dx, rows.count * map.in,
                               true);
      }
    } else {
      ops_.products->linear_input_part(block[map], dy, dy_row, dx, rows.count, add_to_dx);
      expects(map.adapters.empty() || (!dora_ && dropout_ == 0.0), "sums have plain adapters");
      for (const AdapterAt& at : map.adapters) {
        ops_.products->linear_input_part(block[first(at, map.in)], dh_.at(at.number), at.rank, dx,
                                         rows.count, true);
      }
    }
  }

 private:
  [[nodiscard]] LinearAt first(const AdapterAt& at, std::size_t in) const {
    return {.weight = at.a, .in = in, .out = at.rank, .flipped = true};
  }
  [[nodiscard]] LinearAt second(const AdapterAt& at) const {
    return {.weight = at.b, .in = at.rank, .out = at.out, .flipped = true};
  }
  [[nodiscard]] bool has_dora(const LinearAt& map) const { return dora_ && !map.adapters.empty(); }
  /// Returns the map that is multiplied with x. With scales, the bias is added later.
  [[nodiscard]] Linear<T> inner(const BlockWeights<T>& block, const LinearAt& map) const {
    Linear<T> linear = block[map];
    if (has_dora(map)) linear.bias = nullptr;
    return linear;
  }
  /// Returns the part of the map that the adapter belongs to.
  [[nodiscard]] static Linear<T> part(const BlockWeights<T>& block, const LinearAt& map,
                                      const AdapterAt& at) {
    Linear<T> linear = block[map];
    linear.weight += at.column * map.in;
    linear.bias = nullptr;
    linear.out = at.out;
    return linear;
  }
  [[nodiscard]] bool drops(const BlockWeights<T>& block) const {
    return dropout_ > 0.0 && block.dropout.on;
  }
  [[nodiscard]] DropoutMask mask(const BlockWeights<T>& block, const AdapterAt& at, std::size_t in,
                                 const MapRows& rows) const {
    return DropoutMask::of(dropout_, block.dropout.key, at.stream, rows.first * in);
  }

  /// Computes h_ = s A x with dropout. Returns the input of A.
  const T* compute_h(const BlockWeights<T>& block, const AdapterAt& at, std::size_t in, const T* x,
                     const MapRows& rows) {
    const T* read = x;
    if (drops(block)) {
      ops_.elementwise->drop(mask(block, at, in, rows), x, dropped_, rows.count * in, false);
      read = dropped_;
    }
    ops_.products->linear(block[first(at, in)], read, h_, at.rank, rows.count);
    ops_.elementwise->scale(h_, at.scale, rows.count * at.rank);
    return read;
  }
  template <class Y>
  void add_adapters(const BlockWeights<T>& block, const LinearAt& map, const T* x, Y* y,
                    std::size_t y_row, const MapRows& rows) {
    for (const AdapterAt& at : map.adapters) {
      compute_h(block, at, map.in, x, rows);
      add_product(block, at, y + at.column, y_row, rows);
    }
  }
  /// y += B h.
  template <class Y>
  void add_product(const BlockWeights<T>& block, const AdapterAt& at, Y* y, std::size_t y_row,
                   const MapRows& rows) {
    const Product p = forward_product(block[second(at)], h_, y, y_row, rows.count);
    ops_.products->multiply(p.extents, p.a, p.b, p.c, true);
  }

  /// Returns the scales of the adapter's outputs, and stores the inverse norms.
  const float* compute_dora_scales(const BlockWeights<T>& block, const LinearAt& map,
                                   const AdapterAt& at) {
    const Linear<T> w = part(block, map, at);
    const Linear<T> a = block[first(at, map.in)];
    const Matrix rows_of_w = w.flipped ? matrix(w.weight, w.in) : transposed(w.weight, w.out);
    const Matrix columns_of_a = transposed(a.weight, a.in);
    ops_.products->multiply({w.out, at.rank, w.in}, rows_of_w, columns_of_a,
                            matrix(cross_, at.rank));
    ops_.products->multiply({at.rank, at.rank, w.in}, matrix(a.weight, a.in), columns_of_a,
                            matrix(gram_, at.rank));
    float* const scales = dora_scales_.at(at.number);
    ops_.adapters->compute_dora_scales(
        {w, block[second(at)].weight, block[NormAt{.weight = *at.magnitudes}].weight, cross_, gram_,
         at.rank, at.scale},
        scales, inverse_norms_);
    return scales;
  }
  /// Multiplies the sums in y by their scales and adds bias and residual (null: none).
  void scale_results(const BlockWeights<T>& block, const LinearAt& map, const T* residual, T* y,
                     std::size_t y_row, const MapRows& rows) {
    if (!has_dora(map)) return;
    const T* const bias = block[map].bias;
    for (const AdapterAt& at : map.adapters) {
      T* const to = y + at.column;
      ops_.adapters->scale_columns({compute_dora_scales(block, map, at), to, y_row, to, y_row,
                                    rows.count, at.out, bias, residual});
    }
  }
  /// Adds the gradient of the magnitudes (the sums over rows of dy (W x + s B h) / norm) and
  /// returns the gradient of W x + s B h [rows, out]. Requires s A x in h_.
  const T* differentiate_dora(const BlockWeights<T>& block, const LinearAt& map,
                              const AdapterAt& at, const T* x, const T* dy, std::size_t dy_row,
                              const MapRows& rows) {
    const float* const scales = compute_dora_scales(block, map, at);
    ops_.products->linear(part(block, map, at), x, results_, at.out, rows.count);
    add_product(block, at, results_, at.out, rows);
    ops_.adapters->add_column_products(
        {dy, dy_row, results_, at.out, inverse_norms_, rows.count, at.out},
        block[NormAt{.weight = *at.magnitudes}].weight_gradient);
    ops_.adapters->scale_columns({scales, dy, dy_row, results_, at.out, rows.count, at.out});
    return results_;
  }
  /// Returns dy times the scales that linear_weight() has computed [rows, out]. Parts without an
  /// adapter have gain 1.
  const T* gradient_of_sums(const LinearAt& map, const T* dy, std::size_t dy_row,
                            const MapRows& rows) {
    const auto scale = [&](const float* scales, std::size_t column, std::size_t width) {
      if (width == 0) return;
      ops_.adapters->scale_columns(
          {scales, dy + column, dy_row, results_ + column, map.out, rows.count, width});
    };
    std::size_t done = 0;
    for (const AdapterAt& at : map.adapters) {
      scale(nullptr, done, at.column - done);
      scale(dora_scales_.at(at.number), at.column, at.out);
      done = at.column + at.out;
    }
    scale(nullptr, done, map.out - done);
    return results_;
  }

  DeviceOps<T>& ops_;
  double dropout_ = 0.0;
  T* h_ = nullptr;        ///< [rows, rank]
  std::vector<T*> dh_;    ///< gradients of A x for maps with the same input, [rows, rank] each
  T* dropped_ = nullptr;  ///< input of A, or its gradient
  bool dora_ = false;
  T* results_ = nullptr;    ///< W x + s B h, then its gradient
  float* cross_ = nullptr;  ///< W A^T [out, rank]
  float* gram_ = nullptr;   ///< A A^T [rank, rank]
  float* inverse_norms_ = nullptr;
  std::vector<float*> dora_scales_;  ///< scales, for maps with the same input
};

}  // namespace ballast::model
