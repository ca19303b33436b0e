#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/config/config.h"

namespace ballast::tools {

/// A way to run the model of `bench plan`.
struct PlanCase {
  std::string_view name;
  std::string_view what;  ///< description for --list
  /// Config overrides separated by spaces: "link_gbps=2 order=micro_batch_major".
  std::string_view settings;
};

/// Cases with different bottlenecks.
const std::vector<PlanCase>& plan_cases();

/// Ways to run the model with a batch of 8 sequences, chosen by hand, and the same case decided by
/// the planner.
const std::vector<PlanCase>& hand_made_cases();
const PlanCase& planners_case();

/// The config of a case: six layers of GPT-2's width, swapping to `directory`, with the case's
/// settings and then `overrides`. Throws Error(config).
config::Config make_plan_config(const PlanCase& plan_case, const std::filesystem::path& directory,
                                const std::vector<std::string>& overrides);

}  // namespace ballast::tools
