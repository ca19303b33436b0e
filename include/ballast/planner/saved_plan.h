#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include "ballast/config/config.h"
#include "ballast/plan/rates.h"
#include "ballast/planner/plan_choices.h"
#include "ballast/planner/planner.h"
#include "ballast/text/json.h"
#include "ballast/text/output_file.h"

namespace ballast::planner {

/// Returns the keys of `used` that differ from those of `asked`, by path.
text::Json chosen_keys(const config::Config& asked, const config::Config& used);

/// Returns the output rule for saved plans: newer ones replace older ones.
text::OutputRule plan_rule(bool overwrite, std::vector<std::filesystem::path> inputs = {});

/// Writes a plan that read_plan() can apply, as JSON: the original config, the planner's choices,
/// the keys that change with them (for readers), the number of ranks, the kind of device, memory in
/// bytes, the rates, and the predicted step time. Throws like text::OutputFile.
void save_plan(const std::filesystem::path& file, const text::OutputRule& rule,
               const config::Config& asked, const Decision& decision, const plan::Rates& rates);

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

}  // namespace ballast::planner
