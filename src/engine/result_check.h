#pragma once

#include "ballast/model/pass_arguments.h"
#include "ballast/model/step_program.h"

#include "src/engine/current_operation.h"

namespace ballast::engine {

/// Waits for the pass of `at` and searches its results for values that are not finite: activations,
/// their gradients, gradient sums and losses. Copies them to the host in pieces. In fp16 only
/// activations and losses, because gradients overflow while the loss scale adapts. Throws
/// Error(numeric) with the port, the number of such values and the place of the first.
void check_results(const CurrentOperation& at, const model::Pass& pass,
                   const model::PassArguments& arguments);

}  // namespace ballast::engine
