#pragma once

#include <cstddef>
#include <cstdint>

#include "src/model/compute/routing.h"

namespace ballast::model::host {

// What routers compute in fp32 and double, whatever the training type is; the arguments are those
// of Ops, which adds the rest.

/// Softmax, choice and weights of one row. `logits`: its own [experts]; null: the row is padding
/// and chooses nothing.
void route_row(const RouterShape& shape, const float* logits, std::size_t row, const Routing& to);
/// The places of the rows' choices, sorted by expert, then by row. `starts`: see Ops::route().
void place_choices(const RouterShape& shape, const Routing& to, std::int32_t* starts);

void add_router_totals(const RouterShape& shape, const Routing& routing, bool first,
                       const RouterTotals& totals);
void router_losses(const RouterShape& shape, const RouterTotals& totals, double* losses);

/// The gradients of the logits, in double.
class RouterGradient {
 public:
  RouterGradient(const RouterShape& shape, const Routing& routing, const RouterTotals& totals,
                 const RouterLossScales& scales);
  /// gradients [experts] of one row.
  void differentiate(std::size_t row, double* gradients) const;

 private:
  const RouterShape& shape_;
  const Routing& routing_;
  const double* choices_ = nullptr;  ///< null: without losses of the routers
  double rows_ = 0.0;
  double balance_ = 0.0;
  double z_ = 0.0;
};

}  // namespace ballast::model::host
