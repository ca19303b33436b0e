#include "ballast/train/choices.h"

#include <utility>

#include <fmt/format.h>

#include "ballast/core/log.h"
#include "ballast/engine/blueprint.h"
#include "ballast/engine/planner.h"
#include "ballast/train/forecast.h"
#include "ballast/train/machine_rates.h"

namespace ballast::train {

config::Config decide_choices(const config::Config& config) {
  if (!engine::leaves_choices(config)) return config;
  const model::Architecture model = engine::make_architecture(config);
  const schedule::Rates rates = machine_rates(config, model);
  engine::Decision decision = engine::decide(config, model, budgets_of(config, rates), rates);
  const config::Config& chosen = decision.config;
  log(LogLevel::info,
      fmt::format("planner: {} plans simulated; {} micro-batch{} of {}, {} buffers for weights and "
                  "{} for optimizer states, {:.3g} s per step predicted",
                  decision.simulated, chosen.batch.accumulation,
                  chosen.batch.accumulation == 1 ? "" : "es", chosen.batch.micro_batch,
                  decision.blueprint.options.weight_staging,
                  decision.blueprint.options.state_staging, decision.prediction.step_seconds));
  return std::move(decision.config);
}

}  // namespace ballast::train
