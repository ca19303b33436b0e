#pragma once

#include <cstddef>
#include <cstdint>

#include "src/model/compute/routing.h"
#include "src/model/host/kernels.h"

namespace ballast::model::host {

/// The operations of routers and experts (../experts.h).
template <class T>
class RouterOps {
 public:
  RouterOps() : kernels_(best_kernels<T>().rows), sum_kernels_(best_kernels<float>().rows) {}

  /// Adds `bias` [experts] (null: 0) to the logits [rows, step] and computes the probabilities,
  /// choices, weights and places of the rows. `targets` [rows]: kPaddingTarget marks padding rows;
  /// null: there are none. `starts` [experts + 1]: where the places of each expert begin, and the
  /// end of the last; null: not wanted.
  void route(const RouterShape& shape, float* logits, const T* bias, const std::int32_t* targets,
             const Routing& to, std::int32_t* starts) const;
  /// Adds a router's results to the totals. The `first` router resets them.
  void add_router_totals(const RouterShape& shape, const Routing& routing, bool first,
                         const RouterTotals& totals) const;
  /// Writes the load-balancing loss and the z-loss; 0 if all rows are padding.
  void router_losses(const RouterShape& shape, const RouterTotals& totals, double* losses) const;
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
  /// y [rows, width] += bias (null: 0).
  void add_bias(const T* bias, float* y, std::size_t rows, std::size_t width) const;
  /// sums [N, width] += y * weights (null: 1), in the rows of the choices.
  void add_rows(const ExpertRows& rows, const float* y, const float* weights, float* sums,
                std::size_t width) const;

 private:
  /// Calls take(place, quotient) for each choice. The quotient is the product of a row of
  /// `gradients` and one of `with` (rows are `step` apart), divided by the weight, or 0 for a
  /// weight of 0; see dot_rows().
  template <class Take>
  void dot(const ExpertRows& rows, const T* with, std::size_t step, const T* gradients,
           const float* weights, std::size_t width, Take take) const;

  const RowKernels<T>& kernels_;
  const RowKernels<float>& sum_kernels_;  ///< for fp32 sums
};

}  // namespace ballast::model::host
