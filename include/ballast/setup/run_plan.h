#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ballast/comm/communicator.h"
#include "ballast/config/config.h"
#include "ballast/plan/rates.h"
#include "ballast/planner/planner.h"
#include "ballast/setup/forecast.h"
#include "ballast/setup/setup.h"
#include "ballast/text/json.h"
#include "ballast/text/output_file.h"

namespace ballast::calibrate {
struct MachineShare;
}  // namespace ballast::calibrate

namespace ballast::setup {

/// Sets the device, budgets and compute threads that `config` leaves open. Equal on every rank.
void apply_common_share(config::Config& config, const calibrate::MachineShare& share);

/// Sets the update's threads and NUMA node that `config` leaves open. May differ between ranks.
void apply_own_share(config::Config& config, const calibrate::MachineShare& share);

/// Returns the keys of `used` that differ from those of `asked`, by path.
text::Json chosen_keys(const config::Config& asked, const config::Config& used);

/// Returns the output rule for saved plans: newer ones replace older ones.
text::OutputRule plan_rule(bool overwrite, std::vector<std::filesystem::path> inputs = {});

/// Writes a plan that read_plan() can apply, as JSON: the original config, the planner's choices,
/// the keys that change with them (for readers), the number of ranks, the kind of device, memory in
/// bytes, the rates, and the predicted step time. Throws like text::OutputFile.
void save_plan(const std::filesystem::path& file, const text::OutputRule& rule,
               const config::Config& asked, const Forecast& forecast);

/// A saved plan, applied to a config.
struct AppliedPlan {
  config::Config config;
  /// For draw_chosen(). Empty for files of earlier versions, which have only changed keys; then
  /// `config` has the chosen values.
  std::optional<PlanChoices> chosen;
  plan::Rates rates;
};

/// Sets the numbers of tiles that `config` leaves open to those of the plan in `file`. Throws
/// Error(config) for a file of another kind.
void take_tiles(const std::filesystem::path& file, config::Config& config);

/// Applies the plan in `file` to a run of `config` with `world` ranks. Keys that do not affect
/// plans may differ: training data, learning rate, schedule, steps, checkpoints and messages.
/// Throws Error(config), one line, for a file of another kind, another config, number of ranks or
/// device; Error(memory) if the machine has less memory available than the plan needs.
AppliedPlan read_plan(const std::filesystem::path& file, const config::Config& config,
                      std::uint32_t world);

/// This rank's part of a run.
struct RunPlan {
  config::Config config;  ///< with every choice made
  /// With the blueprint of this rank. The rest is empty if the config left nothing to the planner,
  /// and on ranks other than 0.
  planner::Decision decision;
  std::optional<planner::PlanRequest> request;  ///< input of the decision; empty in the same cases
  /// Rates from a file, which replace this machine's on rank 0.
  std::optional<plan::Rates> given_rates;
};

/// Files that replace a measurement or a decision; "": none. At most one is given.
struct PlanSource {
  std::filesystem::path rates;  ///< rates instead of this machine's (load_rates())
  std::filesystem::path plan;   ///< a saved plan (read_plan())
};

/// Returns `config` with the numbers of tiles for plan_run(): planner::fitting_tiles() for the
/// budgets of a rank, or those of a saved plan in `source`. Collective: all ranks get those of rank
/// 0.
config::Config settle_tiles(const config::Config& config, comm::Ranks* ranks,
                            const std::atomic<bool>* interrupted = nullptr,
                            const PlanSource& source = {});

/// Returns `config` with the numbers of tiles that rank 0 has. Collective.
config::Config with_tiles_of_root(const config::Config& config, comm::Ranks* ranks);

/// Plans a run of `config` on this machine. The planner decides every "auto" with this machine's
/// rates (machine_rates()) or those of `source`, and logs the decision; a config without choices
/// needs no rates. A saved plan in `source` is used unchanged.
///
/// `ranks`: the processes of the run, nullptr for a single one. Collective: all ranks run the
/// config that rank 0 decides. Budgets are a rank's share of its machine, equal on all ranks;
/// threads and NUMA node of the update may differ between ranks. The other ranks wait for rank 0
/// without a timeout while it is alive. `interrupted` (may be null) stops measurements with
/// Error(interrupted).
///
/// Throws like planner::decide() and machine_rates(); with ranks comm::JointError, or errors of
/// Ranks.
RunPlan plan_run(const config::Config& config, comm::Ranks* ranks,
                 const std::atomic<bool>* interrupted = nullptr, const PlanSource& source = {});

}  // namespace ballast::setup
