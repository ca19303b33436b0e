#pragma once

#include <array>

#include "ballast/core/gradient_stats.h"
#include "ballast/model/pass_arguments.h"
#include "ballast/model/step_program.h"
#include "ballast/plan/plan.h"

#include "src/engine/current_operation.h"

namespace ballast::engine {

/// The function that performs operations of one action.
struct ActionHandler {
  plan::Action action;
  void (*run)(const CurrentOperation&);
};

// Handlers in separate files.
void run_pass(const CurrentOperation& at);
void run_exchange(const CurrentOperation& at);
void run_gate(const CurrentOperation& at);
void run_update(const CurrentOperation& at);
void run_update_on_device(const CurrentOperation& at);

/// Returns the arguments that the operation binds to the ports of its pass, cut to the sizes of the
/// operands.
model::PassArguments arguments_of(const CurrentOperation& at, const model::Pass& pass);
/// Returns the statistics of a gradient in host memory.
GradientStats statistics_in(const CurrentOperation& at, plan::BufferId buffer);

}  // namespace ballast::engine
