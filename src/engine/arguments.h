#pragma once

#include <cstddef>

#include "ballast/core/view.h"
#include "ballast/model/pass_arguments.h"
#include "ballast/model/step_program.h"
#include "ballast/schedule/plan.h"

#include "src/engine/current_operation.h"

namespace ballast::engine {

/// fp32 sums of the gradient of the output matrix's tile `number` in `buffer`.
DeviceBytes gradient_of_tile(const CurrentOperation& at, schedule::BufferId buffer,
                             std::size_t number);

/// The pass that a compute operation runs, with an operand per use.
model::Pass pass_of(const CurrentOperation& at);

/// What the operation binds to the ports of its pass, cut to the sizes of the operands.
model::PassArguments arguments_of(const CurrentOperation& at, const model::Pass& pass);

}  // namespace ballast::engine
