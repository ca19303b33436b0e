#include "ballast/planning/choices.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "ballast/core/log.h"
#include "ballast/engine/blueprint.h"
#include "ballast/planning/forecast.h"
#include "ballast/planning/machine_rates.h"
#include "ballast/planning/planner.h"

namespace ballast::planning {
void share_out(schedule::Rates& rates, const Company& company) {
  if (rates.shared_cores > 0) {
    rates.shared_cores = std::max(1U, rates.shared_cores / company.sharing);
  }
  for (double* rate : {&rates.read_per_second, &rates.write_per_second, &rates.mixed_per_second}) {
    *rate /= company.local_world;
  }
  rates.fabric_per_second = company.received_per_second;
  rates.network_per_second = company.received_per_second;
  rates.ranks_per_node = company.local_world;
}

config::Config decide_choices(const config::Config& config, const Company& company) {
  if (!leaves_choices(config)) return config;
  const model::Architecture model = engine::make_architecture(config);
  schedule::Rates rates = machine_rates(config, model);
  if (company.world > 1) share_out(rates, company);
  Decision decision = decide(config, model, budgets_of(config, rates), rates, company.world);
  const config::Config& chosen = decision.config;
  log(LogLevel::info,
      fmt::format(
          "planner: {} plans simulated; {} micro-batch{} of {}, {} buffer{} for weights and "
          "{} for optimizer states, {:.3g} s per step predicted",
          decision.simulated, chosen.batch.accumulation, chosen.batch.accumulation == 1 ? "" : "es",
          chosen.batch.micro_batch, decision.blueprint.options.weight_staging,
          decision.blueprint.options.weight_staging == 1 ? "" : "s",
          decision.blueprint.options.state_staging, decision.prediction.step_seconds));
  return std::move(decision.config);
}

}  // namespace ballast::planning
