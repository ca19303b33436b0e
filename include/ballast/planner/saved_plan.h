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

/// The keys of `used` that differ from those of `asked`, by path.
text::Json chosen_keys(const config::Config& asked, const config::Config& used);

/// The rule for saved plans, which are replaced by newer ones.
text::OutputRule plan_rule(bool overwrite, std::vector<std::filesystem::path> inputs = {});

/// Writes a plan that read_plan() can apply, as JSON: the config that was asked for, the planner's
/// choices, the keys that differ with them (for people), the number of ranks, the kind of device,
/// memory in bytes, the rates, and the predicted step time. Throws like text::OutputFile.
void save_plan(const std::filesystem::path& file, const text::OutputRule& rule,
               const config::Config& asked, const Decision& decision, const plan::Rates& rates);

/// A saved plan, applied to a config.
struct AppliedPlan {
  config::Config config;
  /// For draw_chosen(). Empty for files that hold only changed keys, as earlier versions wrote
  /// them: then `config` has the chosen values.
  std::optional<PlanChoices> chosen;
  plan::Rates rates;
};

/// Applies the plan in `file` to a run of `config` with `world` ranks. Keys that no plan depends on
/// may differ: training data, learning rate, schedule, steps, checkpoints and messages. Throws
/// Error(config), one line, for a file of another kind, another config, number of ranks or device;
/// Error(memory) if the machine has less memory available than the plan needs.
AppliedPlan read_plan(const std::filesystem::path& file, const config::Config& config,
                      std::uint32_t world);

}  // namespace ballast::planner
