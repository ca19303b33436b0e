#pragma once

#include <cstddef>
#include <cstdint>

#include "ballast/core/clocks.h"
#include "ballast/model/lora.h"
#include "ballast/model/packed_values.h"

#include "src/model/compute/kernel_arguments.h"
#include "src/model/compute/layer.h"
#include "src/model/compute/routing.h"
#include "src/model/host/delta_rule.h"
#include "src/model/host/kernel_tables.h"

namespace ballast::model::host {

// The part of routing that is in fp32 and double for every training type. Ops adds the rest and
// documents the arguments.

/// Computes scores, choice and weights of one row. `logits`: the row's [experts]; null for a
/// padding row, which chooses nothing. With sigmoid, corrected scores overwrite the logits.
/// `correction`: [experts], or null.
void route_row(const RouterShape& shape, float* logits, const float* correction, std::size_t row,
               const Routing& to);
/// Writes the places of the rows' choices, sorted by expert, then by row. `starts`: see
/// Ops::route().
void place_choices(const RouterShape& shape, const Routing& to, std::int32_t* starts);

void add_router_totals(const RouterShape& shape, const Routing& routing, bool first,
                       const RouterTotals& totals);
void router_losses(const RouterShape& shape, const RouterTotals& totals, double* losses);

/// Gradients of the logits, in double.
class RouterGradient {
 public:
  RouterGradient(const RouterShape& shape, const Routing& routing, const RouterTotals& totals,
                 const RouterLossScales& scales);
  /// Writes the gradients [experts] of one row.
  void differentiate(std::size_t row, double* gradients) const;

 private:
  /// Adds the gradients of the chosen experts' probabilities.
  void add_choices(std::size_t row, double* gradients) const;

  const RouterShape& shape_;
  const Routing& routing_;
  const double* choices_ = nullptr;  ///< null: without router losses
  double rows_ = 0.0;
  double balance_ = 0.0;
  double z_ = 0.0;
};

}  // namespace ballast::model::host
