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

  /// Adds `bias` [experts] (null: 0) to the logits [rows, step], and makes of them the
  /// probabilities, choices, weights and places of the rows. `targets` [rows] tells rows of padding
  /// (kPaddingTarget) from others; null: there is no padding. `starts` [experts + 1]: where the
  /// places of each expert begin and those of the last one end; null: not wanted.
  void route(const RouterShape& shape, float* logits, const T* bias, const std::int32_t* targets,
             const Routing& to, std::int32_t* starts) const;
  /// Adds what a router has decided to the totals, from zero if it is the `first`.
  void add_router_totals(const RouterShape& shape, const Routing& routing, bool first,
                         const RouterTotals& totals) const;
  /// losses = the load-balancing loss and the z-loss; 0 if all rows are padding.
  void router_losses(const RouterShape& shape, const RouterTotals& totals, double* losses) const;
  /// gradients [rows, step] of the logits, given those of the weights; `totals` without values:
  /// without losses of the routers. 0 for padding.
  void router_gradient(const RouterShape& shape, const Routing& routing, const RouterTotals& totals,
                       const RouterLossScales& scales, T* gradients) const;
  /// y [padded, width] = the rows of x, times their weights (null: 1), then zeros.
  void gather_rows(const ExpertRows& rows, const T* x, const float* weights, T* y,
                   std::size_t padded, std::size_t width) const;
  /// The gradients of the weights of choices, given those of what an expert has `activated`, which
  /// contain the weights: the product of both rows / the weight. 0 for a weight of 0, whose
  /// derivative by its logit is 0. Without weights: the product, for put_quotients().
  void dot_rows(const ExpertRows& rows, const T* activated, const T* gradients,
                const float* weights, float* weight_gradients, std::size_t width) const;
  /// Adds the part of a `bias` [width] of the expert's results, given the `gradients` of these.
  void dot_bias(const ExpertRows& rows, const T* bias, const T* gradients, const float* weights,
                float* weight_gradients, std::size_t width) const;
  /// to = values / weights, 0 for a weight of 0, at the places of the choices.
  void put_quotients(const ExpertRows& rows, const float* values, const float* weights,
                     float* to) const;
  /// y [rows, width] += bias (null: 0).
  void add_bias(const T* bias, float* y, std::size_t rows, std::size_t width) const;
  /// sums [N, width] += y, times the weights (null: 1), at the rows of the choices.
  void add_rows(const ExpertRows& rows, const float* y, const float* weights, float* sums,
                std::size_t width) const;

 private:
  /// take(place, product of a row of `gradients` and one of `with`, which are `step` apart, divided
  /// by the weight; 0 if that is 0; see dot_rows()) for each choice.
  template <class Take>
  void dot(const ExpertRows& rows, const T* with, std::size_t step, const T* gradients,
           const float* weights, std::size_t width, Take take) const;

  const RowKernels<T>& kernels_;
  const RowKernels<float>& sum_kernels_;  ///< over fp32 sums
};

}  // namespace ballast::model::host
