#pragma once

#include <cstdint>
#include <span>

#include "ballast/core/view.h"
#include "ballast/plan/plan.h"
#include "ballast/state/store.h"
#include "ballast/step/problem.h"

#include "src/engine/current_operation.h"

// Numbers of rows that routers have sent to experts, which operations find in host memory.

namespace ballast::engine {

/// Bytes of the counts of one router for one micro-batch, of all ranks.
Bytes counts_of_micro_batch(const step::Problem& problem);
/// The place of these in `counts`, a buffer in host memory for all micro-batches.
HostBytes counts_of_micro_batch(const step::Problem& problem, state::Store& store,
                                plan::BufferId counts, std::uint32_t micro);

/// The same as numbers: what model::RoutingCounts reads.
std::span<const std::int32_t> routing_of(const CurrentOperation& at, plan::BufferId counts,
                                         std::uint32_t micro);

/// Whether the conditions of the operation leave it something to do.
bool has_work(const CurrentOperation& at);

/// For the gate, which reads the counts of all routers: adds the rows of each expert and the losses
/// of routers to the result.
void report_routing(const CurrentOperation& at);

}  // namespace ballast::engine
