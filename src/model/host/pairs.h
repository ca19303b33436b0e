#pragma once

#include "src/model/compute/preference.h"

namespace ballast::model::host {

/// The loss of each pair, in results[rows.pairs], and rows.weights. Rows are added in order.
void weigh_pairs(const PairRows& rows, const Preference& how, PairResult* results);

}  // namespace ballast::model::host
