#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "src/model/compute/routing.h"

namespace ballast::model {

/// Routers of mixtures of experts.
template <class T>
class RouterOps {
 public:
  virtual ~RouterOps() = default;

  /// Computes the probabilities, choices, weights and places of the rows from their logits [rows,
  /// step], which it overwrites. `targets` [rows]: kPaddingTarget marks padding rows;
  /// null: there are none. `starts` [experts + 1]: where the places of each expert begin, and the
  /// end of the last; null: not wanted.
  virtual void route(const RouterShape& shape, float* logits, const RouterBiases<T>& biases,
                     const std::int32_t* targets, const Routing& to, std::int32_t* starts) = 0;
  /// Returns [count] numbers that route() has computed, in host memory, valid until the next call.
  /// A device that computes asynchronously waits for the work before.
  [[nodiscard]] virtual std::span<const std::int32_t> fetch(const std::int32_t* values,
                                                            std::size_t count) = 0;
  /// Adds a router's results to the totals. The `first` router resets them.
  virtual void add_router_totals(const RouterShape& shape, const Routing& routing, bool first,
                                 const RouterTotals& totals) = 0;
  /// Replaces the numbers of choices [experts] by those in host memory.
  virtual void put_choices(std::span<const double> choices, const RouterTotals& totals) = 0;
  /// Writes the load-balancing loss and the z-loss; 0 if all rows are padding.
  virtual void router_losses(const RouterShape& shape, const RouterTotals& totals,
                             double* losses) = 0;
  /// Computes the logits' gradients [rows, step] from the gradients of the weights. `totals` are
  /// empty without router losses. 0 for padding rows.
  virtual void router_gradient(const RouterShape& shape, const Routing& routing,
                               const RouterTotals& totals, const RouterLossScales& scales,
                               T* gradients) = 0;
};

/// Rows of experts.
template <class T>
class ExpertOps {
 public:
  virtual ~ExpertOps() = default;

  /// y [padded, width] = rows of x, times their weights (null: 1), followed by zeros.
  virtual void gather_rows(const ExpertRows& rows, const T* x, const float* weights, T* y,
                           std::size_t padded, std::size_t width) = 0;
  /// Computes the gradients of the choices' weights, from the gradients of what an expert has
  /// `activated`, which include the weights: product of both rows / weight. 0 for a weight of 0,
  /// whose derivative with respect to its logit is 0. Without weights: only the product, for
  /// put_quotients().
  virtual void dot_rows(const ExpertRows& rows, const T* activated, const T* gradients,
                        const float* weights, float* weight_gradients, std::size_t width) = 0;
  /// Adds the contribution of a `bias` [width] of the expert's results, given the `gradients` of
  /// these.
  virtual void dot_bias(const ExpertRows& rows, const T* bias, const T* gradients,
                        const float* weights, float* weight_gradients, std::size_t width) = 0;
  /// to = values / weights (0 for a weight of 0), at the places of the choices.
  virtual void put_quotients(const ExpertRows& rows, const float* values, const float* weights,
                             float* to) = 0;
  /// sums [N, width] += y * weights (null: 1), in the rows of the choices.
  virtual void add_rows(const ExpertRows& rows, const float* y, const float* weights, float* sums,
                        std::size_t width) = 0;
};

}  // namespace ballast::model
