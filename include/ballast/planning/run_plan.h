#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ballast/comm/communicator.h"
#include "ballast/config/config.h"
#include "ballast/planning/planner.h"
#include "ballast/schedule/executor.h"

namespace ballast::planning {

/// How this process carries out its part of a run.
struct RunPlan {
  /// Config and blueprint to run, the latter of this rank. Prediction and count are empty where the
  /// config left nothing to the planner, and on ranks other than 0.
  Decision decision;
  std::optional<PlanRequest> request;  ///< from which the planner decided; likewise
};

/// Plans a run of `config` on this machine. What the config leaves open is decided by the planner
/// with this machine's rates, which are measured when no run or plan has done so before, and
/// logged; a config that leaves nothing open is drawn as it is, and nothing is measured.
///
/// `ranks`: the processes of the run, nullptr for this one alone. Collective: all run rank 0's
/// config, decided by it. Budgets are a rank's share of its machine, the same on all ranks; threads
/// and NUMA node of the update are each rank's own. However long rank 0 measures and plans, the
/// others wait for it without a timeout as long as it is alive.
///
/// Throws like decide() and machine_rates(); with ranks comm::JointError, or what Ranks throws.
RunPlan plan_run(const config::Config& config, comm::Ranks* ranks);

/// Says what bounds a run whose steps and evaluations took `seconds`, and which change would make
/// it faster. `improvements` simulates changes (find_improvements()); it is called only for a run
/// that is not bound by compute. Empty: there are no rates to simulate with.
std::string advise(const engine::Blueprint& blueprint, const schedule::LaneTotals& lanes,
                   double seconds, const std::function<std::vector<Variant>()>& improvements = {});

}  // namespace ballast::planning
