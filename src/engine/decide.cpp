#include "ballast/core/dtype.h"
#include "ballast/engine/planner.h"
#include "ballast/model/compute.h"

#include "src/engine/planner.h"

namespace ballast::engine {
namespace {

/// What the kernels need. This build's are the host device's; for a machine that is not here theirs,
/// on one thread, stand in for the real ones.
WorkspaceOf workspace_on(const config::Config& config, const model::Architecture& model,
                         const schedule::Rates& rates) {
  const bool here = rates.shared_cores > 0;
  return [&model, type = config.bf16 ? DType::bf16 : DType::f32,
          threads = here ? config.ballast.compute_threads : 1](model::MicroBatchShape shape) {
    return model::workspace_bytes(model, type, shape, "host", threads);
  };
}

}  // namespace

Decision decide(const config::Config& config, const model::Architecture& model,
                const memory::Budgets& budgets, const schedule::Rates& rates, std::uint32_t world) {
  return decide_with({config, model, budgets, rates, world, workspace_on(config, model, rates)});
}

std::vector<Variant> find_improvements(const Decision& decision, const config::Config& config,
                                       const model::Architecture& model,
                                       const memory::Budgets& budgets, const schedule::Rates& rates,
                                       std::uint32_t world) {
  return find_improvements_with(
      decision, {config, model, budgets, rates, world, workspace_on(config, model, rates)});
}

}  // namespace ballast::engine
