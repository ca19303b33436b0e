#include "ballast/core/dtype.h"
#include "ballast/device/device.h"
#include "ballast/model/compute.h"
#include "ballast/planning/planner.h"

#include "src/planning/planner.h"

namespace ballast::planning {
namespace {

/// What the kernels of the machine with those rates need: the host device's where compute and
/// update share cores, else CUDA's; where this program was built without those, the host device's
/// on one thread stand in for them.
KernelMemoryOf kernel_memory_on(const config::Config& config, const model::Architecture& model,
                                const schedule::Rates& rates) {
  const bool on_host = rates.shared_cores > 0;
  return [&model, type = config.bf16 ? DType::bf16 : DType::f32,
          kind = on_host || !device::cuda_built_in() ? "host" : "cuda",
          threads = on_host ? config.ballast.compute_threads : 1](model::MicroBatchShape shape) {
    return model::kernel_memory(model, type, shape, kind, threads);
  };
}

}  // namespace

Decision decide(const config::Config& config, const model::Architecture& model,
                const memory::Budgets& budgets, const schedule::Rates& rates, std::uint32_t world) {
  return decide_with(
      {config, model, budgets, rates, world, kernel_memory_on(config, model, rates)});
}

std::vector<Variant> find_improvements(const Decision& decision, const config::Config& config,
                                       const model::Architecture& model,
                                       const memory::Budgets& budgets, const schedule::Rates& rates,
                                       std::uint32_t world) {
  return find_improvements_with(
      decision, {config, model, budgets, rates, world, kernel_memory_on(config, model, rates)});
}

}  // namespace ballast::planning
