#pragma once

#include "ballast/engine/blueprint.h"
#include "ballast/plan/simulator.h"
#include "ballast/text/json.h"

namespace ballast::planner {

/// Returns the description of a plan for `ballast plan --json` and run.json: `ledger` (a list of
/// `tier`, `kind`, `bytes`, and with several devices `device`), `budgets`, `peak_bytes` (of the
/// fullest device), `devices`, sizes of the batch, `placement` of each block, `buffers`; with
/// `prediction` (may be null) also `predicted_step_seconds`, `lanes` and `bounds`.
text::Json plan_json(const engine::Blueprint& blueprint, const plan::Prediction* prediction);

}  // namespace ballast::planner
