#pragma once

#include "src/model/compute/preference.h"

namespace ballast::model::host {

/// Writes the loss of each pair to results[rows.pairs], and rows.weights. Rows are added in order.
void weigh_pairs(const PairRows& rows, const Preference& how, PairResult* results);

}  // namespace ballast::model::host
