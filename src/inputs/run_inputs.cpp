#include "ballast/inputs/run_inputs.h"

#include <algorithm>
#include <memory>
#include <utility>

#include <fmt/format.h>

#include "ballast/config/config.h"
#include "ballast/core/error.h"
#include "ballast/inputs/engine_inputs.h"
#include "ballast/model/family.h"

namespace ballast::inputs {
namespace {

step::Options schedule_options(const config::Config& config) {
  step::Options options;
  options.order = config.ballast.order.value_or(options.order);
  options.update = config.ballast.update;
  options.expert_updates = config.ballast.expert_updates;
  options.prefetches_experts = config.ballast.expert_prefetch.value_or(false);
  for (const config::BufferKind& kind : config::kBufferKinds) {
    const std::uint32_t named = config.buffers.*(kind.count);
    if (named > 0) options.buffers.*(kind.count) = named;
  }
  if (config.ballast.writes_checkpoints()) {
    options.kept_checkpoints = static_cast<std::uint32_t>(config.ballast.checkpoint_keep);
  }
  return options;
}

/// Returns how many ranks share one copy of the weights; 0: all.
std::uint32_t hpz_partition_size(std::uint64_t size, std::uint32_t sharers) {
  if (size == 1 || sharers == 1) return 0;
  if (sharers % size == 0) return static_cast<std::uint32_t>(size);
  throw Error(ErrorCategory::config,
              fmt::format("zero_optimization.zero_hpz_partition_size: {} does not divide the {} "
                          "ranks of this run; give a divisor, usually the ranks of a node, or 1",
                          size, sharers));
}

void check_expert_parallel(std::uint64_t ranks, std::uint32_t sharers) {
  if (ranks == 1 || ranks == sharers) return;
  throw Error(ErrorCategory::config,
              fmt::format("ballast.expert_parallel: {}, but the run has {} rank{}; give {}1", ranks,
                          sharers, sharers == 1 ? "" : "s",
                          sharers == 1 ? "" : fmt::format("{} or ", sharers)));
}

/// Returns whether the ranks that share the batch may also share the experts of a layer.
bool may_share_experts(const config::Config& config) {
  if (config.ballast.expert_parallel != 0) return config.ballast.expert_parallel > 1;
  return model::has_experts(config.model);
}

/// Returns the maximum number of elements per sub-group, such that a buffer for their states takes
/// a small part of the host budget and staging does not grow with the width of a layer. `named`:
/// ShardingRule::sub_group_size.
Elems sub_group_size(std::uint64_t named, DType type, const engine::StateFormat& states,
                     const memory::Budgets& budgets) {
  constexpr Elems kLeast = Elems{1} << 22U;
  constexpr Elems kMax = Elems{1} << 40U;
  constexpr Bytes kParts = 16;
  Elems size = kLeast;
  const auto fits = [&](Elems elements) {
    return engine::StateLayout(type, states, elements).state_bytes <= budgets.host / kParts;
  };
  while (size < kMax && fits(2 * size)) size *= 2;
  return named > 0 ? std::min<Elems>(named, size) : size;
}

DeviceRequest devices_of(const config::Config& config, std::uint32_t local_rank) {
  DeviceRequest request = {.options = {},
                           .count = config.devices(),
                           .listed = static_cast<std::uint32_t>(config.ballast.devices.size()),
                           .open = config.pipeline.stages == 0,
                           .compute_threads = config.ballast.compute_threads,
                           .link_gbps = config.ballast.link_gbps};
  device::DeviceOptions options = device_options(config, local_rank);
  for (const std::uint32_t number : device_numbers(config, local_rank)) {
    options.local_rank = number;
    request.options.push_back(options);
  }
  return request;
}

/// Returns the inputs without the model, `train` and the swap paths.
RunInputs settings_of(const config::Config& config, std::uint32_t local_rank) {
  const config::BallastSection& ballast = config.ballast;
  RunInputs run;
  run.type = config.type;
  run.states = {config.optimizer.type, ballast.optimizer_states};
  run.batch = {.shape = shape_of(config),
               .accumulation = config.batch.accumulation,
               .automatic = config.batch.automatic,
               .pairs = !config.data.pairs.empty(),
               .packed = config.has_positions()};
  run.eval_batches = ballast.eval_batches;
  run.sharding = {.stage = static_cast<std::uint32_t>(config.zero.stage),
                  .hpz_partition_size = config.zero.hpz_partition_size,
                  .persistence_threshold = config.zero.persistence_threshold,
                  .sub_group_size = config.zero.sub_group_size,
                  .quantized_weights = config.zero.quantized_weights,
                  .partition_activations = config.partition_activations};
  run.options = schedule_options(config);
  run.devices = devices_of(config, local_rank);
  run.kernels = kernel_request(config);
  run.update = updater_options(config);
  run.update_isa = config::name_of(ballast.update_isa);
  run.state_type = config::name_of(ballast.optimizer_states);
  run.may_swap = may_swap(config);
  run.must_swap = must_swap(config);
  run.delays = ballast.serial || ballast.delay_seed.has_value();
  return run;
}

}  // namespace

KernelRequest kernel_request(const config::Config& config) {
  const config::BallastSection& ballast = config.ballast;
  using Timing = KernelRequest::Timing;
  KernelRequest request = {
      .set = ballast.kernels, .checks = ballast.gpu_checks, .attention = ballast.attention};
  if (ballast.product_algorithms == config::ProductSearch::heuristic)
    request.timing = Timing::never;
  if (ballast.product_algorithms == config::ProductSearch::timed) request.timing = Timing::always;
  request.names =
      fmt::format("kernels {} checks {} attention {} products {}", config::name_of(ballast.kernels),
                  config::name_of(ballast.gpu_checks), config::name_of(ballast.attention),
                  config::name_of(ballast.product_algorithms));
  return request;
}

cpu_adam::UpdaterOptions updater_options(const config::Config& config) {
  return {.threads = config.ballast.update_threads,
          .isa = config.ballast.update_isa,
          .numa_node = config.ballast.update_numa_node};
}

std::uint32_t channels_per_device(const config::Config& config, std::uint32_t ranks) {
  if (ranks == 1) return 0;
  const Mesh mesh = mesh_of(config, ranks);
  const std::uint32_t sharers = mesh.sharers();
  const std::uint32_t group =
      config.zero.stage >= 3 ? hpz_partition_size(config.zero.hpz_partition_size, sharers) : 0;
  return engine::ChannelMembers(mesh, group > 0 ? group : sharers,
                                sharers > 1 && may_share_experts(config))
      .count();
}

std::uint32_t available_devices(const DeviceRequest& devices, std::uint32_t local_world) {
  static_assert(config::kMaxStages == plan::kMaxDevices);
  const auto most = [](std::uint32_t count) { return std::clamp(count, 1U, config::kMaxStages); };
  if (devices.listed > 0) return most(devices.listed);
  if (device::shares_host_cores(devices.first())) return 1;
  return most(device::count_gpus() / local_world);
}

std::uint32_t available_devices(const config::Config& config, std::uint32_t local_world) {
  return available_devices(devices_of(config, 0), local_world);
}

RunInputs translate(const config::Config& config, const comm::Launch& launch) {
  RunInputs run = settings_of(config, launch.local_rank);
  run.model = model_of(config);
  run.train = [trained = std::make_shared<const config::Config>(config)](
                  const model::ModelConfig& model, model::RankSplit split) {
    config::Config other = *trained;
    other.model = model;
    other.ballast.expert_parallel = split.experts;
    other.tensor_parallel = split.tensor;
    return model_of(other);
  };
  run.swap = swap_options(config, launch);
  return run;
}

engine::Blueprint outline(const RunInputs& run, const memory::Budgets& budgets,
                          const model::KernelSizes& kernels, const Mesh& mesh) {
  check_expert_parallel(run.model.split.experts, mesh.sharers());
  const ShardingRule& sharding = run.sharding;
  engine::Blueprint blueprint;
  blueprint.model = run.model;
  blueprint.type = run.type;
  blueprint.states = run.states;
  blueprint.sub_group_size = sub_group_size(sharding.sub_group_size, run.type, run.states, budgets);
  blueprint.shape = run.batch.shape;
  blueprint.pairs = run.batch.pairs;
  blueprint.packed = run.batch.packed;
  blueprint.micro_batches = run.batch.accumulation;
  blueprint.budgets = budgets;
  blueprint.options = run.options;
  blueprint.mesh = mesh;
  step::Problem& problem = blueprint.problem;
  problem.devices = run.devices.count;
  problem.sharers = mesh.sharers();
  problem.tensor = mesh.tensor;
  problem.partitions_activations = sharding.partition_activations;
  problem.stage = sharding.stage;
  problem.hpz_partition_size = hpz_partition_size(sharding.hpz_partition_size, mesh.sharers());
  if (sharding.quantized_weights) problem.qwz_weight_bytes = size_of(blueprint.type);
  engine::size_problem(blueprint, kernels, run.eval_batches / mesh.data,
                       sharding.persistence_threshold);
  return blueprint;
}

engine::Blueprint outline(const config::Config& config, const model::Architecture& model,
                          const memory::Budgets& budgets, const model::KernelSizes& kernels,
                          const Mesh& mesh) {
  RunInputs run = settings_of(config, 0);
  run.model = model;
  return outline(run, budgets, kernels, mesh);
}

}  // namespace ballast::inputs
