#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "ballast/core/clocks.h"
#include "ballast/device/device.h"
#include "ballast/model/packed_values.h"

#include "src/model/compute/factories.h"
#include "src/model/compute/formulas.h"
#include "src/model/compute/kernel_arguments.h"
#include "src/model/compute/layer.h"
#include "src/model/compute/routing.h"
#include "src/model/host/kernel_tables.h"
#include "src/model/host/layer_ops.h"
#include "src/model/host/products.h"
#include "src/model/host/shared_state.h"
#include "src/model/ops/device_ops.h"

namespace ballast::model::host {

/// The operations of the host device (../layer.h), spread over the OpenMP team of the stream's
/// thread. Per-thread sums of weight gradients are added in thread order.
template <class T>
class Ops : public DeviceOps<T> {
 public:
  /// Maximum memory for logits.
  static constexpr Bytes kLogitBytes = 128 * kMiB;
  /// Returns whether a product that sums over `extent` elements does so in parts. Each part then
  /// adds to the result, which must be fp32.
  static constexpr bool sums_in_parts(std::size_t /*extent*/) { return false; }

  /// `threads`: size of the team.
  Ops(const KernelExtents& extents, std::size_t threads, const MlpRule& mlp_rule = kMlpRule);

  [[nodiscard]] const MlpRule& mlp_rule() const { return mlp_rule_; }

  /// Enqueues `work`, which calls the functions below.
  void run(device::Stream& stream, std::function<void()> work);

  /// See Compute::arithmetic().
  [[nodiscard]] std::string arithmetic() const { return describe_arithmetic(threads_); }
  /// Takes the memory shared by all operations.
  void take_memory(Bump& bump) { state_->take_memory(bump); }

  /// y = x W (+ bias), with rows of y `y_row` apart.
  void linear(const Linear<T>& layer, const T* x, T* y, std::size_t y_row, std::size_t rows);
  /// y = residual + x W (+ bias), rows without gaps.
  void linear_onto(const Linear<T>& layer, const T* x, const T* residual, T* y, std::size_t rows);
  /// part = x W (+ bias) in fp32, rows without gaps.
  void linear_part(const Linear<T>& layer, const T* x, float* part, std::size_t rows) {
    const Product p = forward_product(layer, x, part, layer.out, rows);
    multiply(p.extents, p.a, p.b, p.c);
    this->elementwise->add_bias(layer.bias, part, rows, layer.out);
  }
  /// dx = dy W^T (+ dx), with rows of dy `dy_row` apart. D: T or float.
  template <class D>
  void linear_input(const Linear<T>& layer, const T* dy, std::size_t dy_row, D* dx,
                    std::size_t rows, bool add_to_dx = false) {
    const Product p = input_product(layer, dy, dy_row, dx, rows);
    multiply(p.extents, p.a, p.b, p.c, add_to_dx);
  }
  /// Adds x^T dy to the weight's gradient, or overwrites it (Linear::overwrites_gradient).
  void linear_weight(const Linear<T>& layer, const T* x, const T* dy, std::size_t dy_row,
                     std::size_t rows);
  /// c = a * b (+ c).
  void multiply(const Extents& extents, const Matrix& a, const Matrix& b, const Matrix& c,
                bool add_to_c = false) {
    products_.multiply(extents, a, b, c, add_to_c);
  }

  /// Throws Error(data) with the first token of the micro-batch that is not below the vocabulary
  /// size, or is below `least`.
  void check_tokens(const std::int32_t* tokens, std::int32_t least) const;
  /// out[i] = row of its token (+ row of its position, if the embedding has positions). Tiles: see
  /// Embedding.
  void embed(const Embedding<const T>& tables, const Ids& ids, T* out) const;
  [[nodiscard]] std::size_t embedding_scratch_bytes() const { return 0; }
  /// Adds dy to the sum rows of the tokens, in token order, and to the rows of their positions.
  void embed_backward(const Ids& ids, const T* dy, const Embedding<float>& gradients,
                      std::byte* scratch) const;
  /// Applies the soft cap to a tile of logits.
  void cap_logits(const LogitTile& tile) const;
  /// Computes the sums of a tile of logits and merges them with `sums`; the `first` tile overwrites
  /// these. Rows with negative targets have the sums of no logits.
  void sum_logits(const LogitTile& tile, const std::int32_t* targets, bool first,
                  RowSum<float>* sums) const;
  /// Merges the sums of all tiles: the result of sum_logits() for one tile after the other.
  void merge_row_sums(const RowSumsOfTiles& tiles, RowSum<float>* sums) const;
  /// Replaces logits by gradients of the rows' losses times `scale` and their `weights` (null: 1).
  /// With a soft cap, these are gradients of the logits before the cap.
  /// 0 for negative targets.
  void logit_gradients(const LogitTile& tile, const std::int32_t* targets, float scale,
                       const float* weights, const RowSum<float>* sums) const;
  /// losses[r] = cross-entropy of the row in nats, 0 for a negative target.
  void row_losses(const RowSum<float>* sums, const std::int32_t* targets, std::size_t rows,
                  double* losses) const;
  /// sums[p] = sum of losses [p * count, (p + 1) * count).
  void sum_losses(const double* losses, std::size_t count, std::size_t parts, double* sums) const;
  /// Writes the loss of each pair to results[rows.pairs], and rows.weights. Rows are added in
  /// order.
  void dpo_loss(const PairRows& rows, const Preference& how, PairResult* results) const;

  /// Computes the probabilities, choices, weights and places of the rows from their logits [rows,
  /// step], which it overwrites. `targets` [rows]: kPaddingTarget marks padding rows;
  /// null: there are none. `starts` [experts + 1]: where the places of each expert begin, and the
  /// end of the last; null: not wanted.
  void route(const RouterShape& shape, float* logits, const RouterBiases<T>& biases,
             const std::int32_t* targets, const Routing& to, std::int32_t* starts) const;
  /// Returns [count] numbers that route() has computed, in host memory, valid until the next call.
  /// On other devices it waits for the work before.
  [[nodiscard]] std::span<const std::int32_t> fetch(const std::int32_t* values, std::size_t count) {
    return {values, count};
  }
  /// Adds a router's results to the totals. The `first` router resets them.
  void add_router_totals(const RouterShape& shape, const Routing& routing, bool first,
                         const RouterTotals& totals) const {
    host::add_router_totals(shape, routing, first, totals);
  }
  /// Writes the load-balancing loss and the z-loss; 0 if all rows are padding.
  void router_losses(const RouterShape& shape, const RouterTotals& totals, double* losses) const {
    host::router_losses(shape, totals, losses);
  }
  /// Computes the logits' gradients [rows, step] from the gradients of the weights. `totals` are
  /// empty without router losses. 0 for padding rows.
  void router_gradient(const RouterShape& shape, const Routing& routing, const RouterTotals& totals,
                       const RouterLossScales& scales, T* gradients) const;
  /// y [padded, width] = rows of x, times their weights (null: 1), followed by zeros.
  void gather_rows(const ExpertRows& rows, const T* x, const float* weights, T* y,
                   std::size_t padded, std::size_t width) const;
  /// Computes the gradients of the choices' weights, from the gradients of what an expert has
  /// `activated`, which include the weights: product of both rows / weight. 0 for a weight of 0,
  /// whose derivative with respect to its logit is 0. Without weights: only the product, for
  /// put_quotients().
  void dot_rows(const ExpertRows& rows, const T* activated, const T* gradients,
                const float* weights, float* weight_gradients, std::size_t width) const;
  /// Adds the contribution of a `bias` [width] of the expert's results, given the `gradients` of
  /// these.
  void dot_bias(const ExpertRows& rows, const T* bias, const T* gradients, const float* weights,
                float* weight_gradients, std::size_t width) const;
  /// to = values / weights (0 for a weight of 0), at the places of the choices.
  void put_quotients(const ExpertRows& rows, const float* values, const float* weights,
                     float* to) const;
  /// sums [N, width] += y * weights (null: 1), in the rows of the choices.
  void add_rows(const ExpertRows& rows, const float* y, const float* weights, float* sums,
                std::size_t width) const;

  /// For row i: inverse_norms[i] = 1 / ||W + s B A|| and scales[i] = magnitude / norm, both 0 for a
  /// row of zeros. The order in which squares are summed depends only on the shape.
  void compute_dora_scales(const AdaptedRows<T>& rows, float* scales, float* inverse_norms) const;
  void scale_columns(const ScaledColumns<T>& columns) const;
  void add_column_products(const ColumnProducts<T>& columns, float* gradient) const;

 private:
  /// Calls take(place, quotient) for each choice. The quotient is the product of a row of
  /// `gradients` and one of `with` (rows are `step` apart), divided by the weight, or 0 for a
  /// weight of 0; see dot_rows().
  template <class Take>
  void dot(const ExpertRows& rows, const T* with, std::size_t step, const T* gradients,
           const float* weights, std::size_t width, Take take) const;

  State<T> state_;
  const RowKernels<T>& kernels_;
  const RowKernels<float>& sum_kernels_;  ///< for fp32 sums
  MicroBatchShape shape_;
  std::size_t hidden_;
  std::size_t vocabulary_;
  std::size_t threads_;
  MlpRule mlp_rule_;
  Products products_;
};

}  // namespace ballast::model::host
