#pragma once

#include <span>
#include <vector>

#include "ballast/core/dtype.h"
#include "ballast/core/view.h"
#include "ballast/model/architecture.h"
#include "ballast/model/pass_arguments.h"
#include "ballast/model/step_program.h"

namespace ballast::calibrate {

/// Returns the passes of a training step of one micro-batch, in order. A head in tiles visits each
/// tile.
std::vector<model::PassId> training_passes(const model::StepProgram& program);

/// Returns whether passes outside of a run get memory for the operand. They do without the
/// intermediates of the forward pass, so that the backward pass recomputes them, and the workspace
/// belongs to model::Compute.
bool is_bound(const model::Operand& operand);

/// Returns the bytes of an operand that is_bound().
Bytes bytes_of(const model::Operand& operand, const model::StepProgram& program,
               const model::Architecture& model, DType type);

/// Returns the arguments of `pass` for a micro-batch of `tokens` tokens. `memory` has the device
/// memory of each operand, in the order of the operands; it is empty for those that are not bound.
/// Row counts, which are in host memory, are left out.
model::PassArguments bind_pass(const model::Pass& pass, std::uint64_t tokens,
                               std::span<const DeviceBytes> memory);

}  // namespace ballast::calibrate
