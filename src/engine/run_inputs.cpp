#include "ballast/engine/run_inputs.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/device/device.h"

#include "src/model/description/layer_rules.h"

namespace ballast::engine {
namespace {

void check_expert_parallel(std::uint64_t ranks, std::uint32_t sharers) {
  if (ranks == 1 || ranks == sharers) return;
  throw Error(ErrorCategory::config,
              fmt::format("ballast.expert_parallel: {}, but the run has {} rank{}; give {}1", ranks,
                          sharers, sharers == 1 ? "" : "s",
                          sharers == 1 ? "" : fmt::format("{} or ", sharers)));
}

/// Returns the maximum number of elements per sub-group, such that a buffer for their states takes
/// a small part of the host budget and staging does not grow with the width of a layer. `named`:
/// ShardingRule::sub_group_size.
Elems sub_group_size(std::uint64_t named, DType type, const StateFormat& states,
                     const memory::Budgets& budgets) {
  constexpr Elems kLeast = Elems{1} << 22U;
  constexpr Elems kMax = Elems{1} << 40U;
  constexpr Bytes kParts = 16;
  Elems size = kLeast;
  const auto fits = [&](Elems elements) {
    return StateLayout(type, states, elements).state_bytes <= budgets.host / kParts;
  };
  while (size < kMax && fits(2 * size)) size *= 2;
  return named > 0 ? std::min<Elems>(named, size) : size;
}

/// Returns the options of a run, with what the user has set and defaults for the rest.
step::Options schedule_options(const RunInputs& run) {
  step::Options options = run.options;
  const Constraints& set = run.constraints;
  options.order = set.order.value_or(options.order);
  options.prefetches_experts = set.expert_prefetch.value_or(options.prefetches_experts);
  for (const step::BufferKind& kind : step::kBufferKinds) {
    if (set.buffers.*(kind.count) > 0) options.buffers.*(kind.count) = set.buffers.*(kind.count);
  }
  return options;
}

}  // namespace

BatchRule BatchRule::with_samples(std::uint64_t size, std::uint32_t data_ranks) const {
  BatchRule changed = *this;
  changed.shape.sequences = size * (pairs ? 2 : 1);
  changed.accumulation = train_batch / data_ranks / size;
  changed.automatic = false;
  return changed;
}

std::uint32_t ShardingRule::copy_sharers(std::uint32_t sharers) const {
  if (hpz_partition_size == 1 || sharers == 1) return 0;
  if (sharers % hpz_partition_size == 0) return static_cast<std::uint32_t>(hpz_partition_size);
  throw Error(ErrorCategory::config,
              fmt::format("zero_optimization.zero_hpz_partition_size: {} does not divide the {} "
                          "ranks of this run; give a divisor, usually the ranks of a node, or 1",
                          hpz_partition_size, sharers));
}

bool Constraints::must_swap() const {
  const auto on_nvme = [](const step::PlacementConstraint& one) {
    return one.weights == Tier::nvme || one.optimizer == Tier::nvme ||
           one.activations == Tier::nvme || one.gradients == Tier::nvme;
  };
  return on_nvme(placement) || std::any_of(rules.begin(), rules.end(), on_nvme);
}

bool Constraints::may_swap() const {
  return must_swap() || !placement.weights || !placement.optimizer;
}

bool RunInputs::has_losses_of_step() const {
  return router_losses == model::RouterLossSpan::step && model::router_losses(model.config).any();
}

model::Architecture RunInputs::trained_like(const model::ModelConfig& config,
                                            const model::RankSplit& split) const {
  return model::build_trained(
      config, split, trained, [](std::string_view key, const std::string& rule) {
        throw Error(ErrorCategory::config, fmt::format("ballast.{}: {}", key, rule));
      });
}

std::uint32_t available_devices(const DeviceRequest& devices, std::uint32_t local_world) {
  const auto most = [](std::uint32_t count) { return std::clamp(count, 1U, plan::kMaxDevices); };
  if (devices.listed > 0) return most(devices.listed);
  if (device::shares_host_cores(devices.first())) return 1;
  return most(device::count_gpus() / local_world);
}

Blueprint outline(const RunInputs& run, const BatchRule& batch, const memory::Budgets& budgets,
                  const model::KernelSizes& kernels, const Mesh& mesh) {
  check_expert_parallel(run.model.split.experts, mesh.sharers());
  const ShardingRule& sharding = run.sharding;
  Blueprint blueprint;
  blueprint.model = run.model;
  blueprint.type = run.type;
  blueprint.states = run.states;
  blueprint.sub_group_size = sub_group_size(sharding.sub_group_size, run.type, run.states, budgets);
  blueprint.shape = batch.shape;
  blueprint.pairs = batch.pairs;
  blueprint.packed = batch.packed;
  blueprint.router_losses = run.router_losses;
  blueprint.micro_batches = batch.accumulation;
  blueprint.budgets = budgets;
  blueprint.options = schedule_options(run);
  blueprint.mesh = mesh;
  step::Problem& problem = blueprint.problem;
  problem.devices = run.devices.count;
  problem.sharers = mesh.sharers();
  problem.tensor = mesh.tensor;
  problem.partitions_activations = sharding.partition_activations;
  problem.stage = sharding.stage;
  problem.hpz_partition_size = sharding.copy_sharers(mesh.sharers());
  if (sharding.quantized_weights) problem.qwz_weight_bytes = size_of(blueprint.type);
  size_problem(blueprint, kernels, run.eval_batches / mesh.data, sharding.persistence_threshold);
  return blueprint;
}

}  // namespace ballast::engine
