#include "src/engine/outline.h"

#include <algorithm>

#include <fmt/format.h>

#include "ballast/core/error.h"

#include "src/engine/state_layout.h"

namespace ballast::engine {
namespace {

cpu_adam::Optimizer optimizer_of(config::OptimizerSection::Type type) {
  using Type = config::OptimizerSection::Type;
  switch (type) {
    case Type::adamw:
      break;
    case Type::adam:
      return cpu_adam::Optimizer::adam;
    case Type::adagrad:
      return cpu_adam::Optimizer::adagrad;
    case Type::lion:
      return cpu_adam::Optimizer::lion;
    case Type::sgd:
      return cpu_adam::Optimizer::sgd;
  }
  return cpu_adam::Optimizer::adamw;
}

StateFormat state_format(const config::Config& config) {
  using Format = cpu_adam::Moments::Format;
  const std::string& states = config.ballast.optimizer_states;
  return {.optimizer = optimizer_of(config.optimizer.type),
          .moments = states == "8bit"         ? Format::blockwise8
                     : states == "bf16_first" ? Format::bf16_first
                                              : Format::f32};
}

schedule::Options schedule_options(const config::Config& config) {
  schedule::Options options;
  if (config.ballast.order == "micro_batch_major") {
    options.order = schedule::Order::micro_batch_major;
  }
  if (config.ballast.update == "eager") options.update = schedule::Update::eager;
  const auto count = [](std::uint64_t wanted, std::uint32_t standard) {
    return wanted > 0 ? static_cast<std::uint32_t>(wanted) : standard;
  };
  options.state_staging = count(config.zero.optimizer.buffer_count, options.state_staging);
  options.weight_staging = count(config.zero.parameters.buffer_count, options.weight_staging);
  options.weight_slots = count(config.ballast.device_weight_buffers, options.weight_slots);
  options.activation_staging = count(config.ballast.activation_buffers, options.activation_staging);
  return options;
}

/// How many ranks have one copy of the weights together; 0: all.
std::uint32_t weight_ranks(const config::ZeroSection& zero, std::uint32_t world) {
  const std::uint64_t size = zero.hpz_partition_size;
  if (size == 1 || world == 1) return 0;
  if (world % size == 0) return static_cast<std::uint32_t>(size);
  throw Error(ErrorCategory::config,
              fmt::format("zero_optimization.zero_hpz_partition_size: {} does not divide the {} "
                          "ranks of this run; give a divisor, usually the ranks of a node, or 1",
                          size, world));
}

/// Sizes of the blocks, of which this rank keeps its part of the states.
void add_blocks(Blueprint& blueprint, const config::ZeroSection& zero,
                const model::KernelMemory& kernels) {
  const std::vector<Bytes>& kept = kernels.intermediates;
  expects(kept.empty() || kept.size() == blueprint.model.blocks.size(),
          "kernel memory of another model");
  schedule::Workload& work = blueprint.workload;
  for (std::size_t b = 0; b < blueprint.model.blocks.size(); ++b) {
    const model::BlockSpec& block = blueprint.model.blocks[b];
    work.blocks.push_back({.name = block.name,
                           .weight_bytes = block.elements * size_of(blueprint.type),
                           .accumulator_bytes = block.elements * size_of(DType::f32),
                           .gradient_bytes = block.elements * size_of(blueprint.type),
                           .forward_flops = blueprint.model.forward_flops(
                               b, blueprint.shape.sequences, blueprint.shape.length),
                           .recomputed_flops = blueprint.model.recomputed_flops(
                               b, blueprint.shape.sequences, blueprint.shape.length),
                           .keeps_whole = block.parameters <= zero.persistence_threshold,
                           .intermediate_bytes = kept.empty() ? 0 : kept[b]});
    const StateLayout states = state_layout(blueprint, b);
    work.blocks.back().state_bytes = states.state_bytes;
    work.blocks.back().update_traffic = states.update_traffic;
  }
}

void add_batch(Blueprint& blueprint, std::uint64_t evaluation_micro_batches) {
  schedule::Workload& work = blueprint.workload;
  const std::uint64_t tokens = blueprint.shape.tokens();
  const std::uint64_t width = blueprint.model.config.hidden_size;
  work.activation_bytes = tokens * width * size_of(blueprint.type);
  work.batch_bytes = 2 * tokens * sizeof(std::int32_t);
  work.losses_bytes = blueprint.micro_batches * sizeof(double);
  work.statistics_bytes = sizeof(model::GradientStats);
  work.micro_batch_tokens = tokens;
  work.micro_batches = static_cast<std::uint32_t>(blueprint.micro_batches);
  work.evaluation_micro_batches = static_cast<std::uint32_t>(
      std::clamp<std::uint64_t>(evaluation_micro_batches, 1, blueprint.micro_batches));
  work.tied = blueprint.model.config.tie_embeddings;
  if (work.tied) {
    work.tied_accumulator_bytes = blueprint.model.config.vocab_size * width * size_of(DType::f32);
  }
}

}  // namespace

std::vector<Wish> read_wishes(const config::Config& config, std::size_t blocks) {
  std::vector<Wish> wishes(blocks, {config.zero.parameters.tier, config.zero.optimizer.tier,
                                    config.ballast.activations, config.ballast.recompute});
  for (const auto& rule : config.ballast.placement) {
    if (rule.last_block >= blocks) {
      throw Error(ErrorCategory::config,
                  fmt::format("ballast.placement: block {} does not exist; the model has blocks 0 "
                              "to {}",
                              rule.last_block, blocks - 1));
    }
    for (std::uint64_t b = rule.first_block; b <= rule.last_block; ++b) {
      if (rule.weights) wishes[b].weights = rule.weights;
      if (rule.optimizer) wishes[b].optimizer = rule.optimizer;
      if (rule.activations) wishes[b].activations = rule.activations;
      if (rule.recompute) wishes[b].recompute = rule.recompute;
    }
  }
  return wishes;
}

Blueprint outline(const config::Config& config, const model::Architecture& model,
                  const memory::Budgets& budgets, const model::KernelMemory& kernels,
                  std::uint32_t world) {
  Blueprint blueprint;
  blueprint.model = model;
  blueprint.type = config.type;
  blueprint.states = state_format(config);
  blueprint.shape = {config.batch.micro_batch, config.data.sequence_length};
  blueprint.micro_batches = config.batch.accumulation;
  blueprint.budgets = budgets;
  blueprint.workload.world = world;
  blueprint.workload.stage = static_cast<std::uint32_t>(config.zero.stage);
  blueprint.workload.weight_ranks = weight_ranks(config.zero, world);
  if (config.zero.quantized_weights) blueprint.workload.coded_weight = size_of(blueprint.type);
  blueprint.workload.workspace_bytes = kernels.workspace;
  add_blocks(blueprint, config.zero, kernels);
  add_batch(blueprint, config.ballast.eval_batches / world);
  blueprint.options = schedule_options(config);
  return blueprint;
}

}  // namespace ballast::engine
