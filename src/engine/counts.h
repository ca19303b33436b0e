#pragma once

#include <cstdint>
#include <span>

#include "ballast/core/view.h"
#include "ballast/plan/plan.h"
#include "ballast/state/store.h"
#include "ballast/step/problem.h"

#include "src/engine/current_operation.h"

// Row counts: numbers of rows that routers have dispatched to experts, which operations read in
// host memory.

namespace ballast::engine {

/// Returns the bytes of one router's counts for one micro-batch, over all ranks.
Bytes counts_of_micro_batch(const step::Problem& problem);
/// Returns their place in `counts`, a buffer in host memory for all micro-batches.
HostBytes counts_of_micro_batch(const step::Problem& problem, state::Store& store,
                                plan::BufferId counts, std::uint32_t micro);

/// Returns them as the numbers that model::RoutingCounts reads.
std::span<const std::int32_t> routing_of(const CurrentOperation& at, plan::BufferId counts,
                                         std::uint32_t micro);

/// Returns whether the conditions of the operation require work.
bool has_work(const CurrentOperation& at);

/// For the gate, which reads the counts of all routers: adds the rows of each expert and the router
/// losses to the result.
void report_routing(const CurrentOperation& at);

}  // namespace ballast::engine
