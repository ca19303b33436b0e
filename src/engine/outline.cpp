#include "src/engine/outline.h"

#include <algorithm>

#include <fmt/format.h>

#include "ballast/core/error.h"

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
  return options;
}

}  // namespace

std::vector<Wish> read_wishes(const config::Config& config, std::size_t blocks,
                              std::uint32_t world) {
  std::vector<Wish> wishes(blocks, {config.zero.parameters.tier, config.zero.optimizer.tier,
                                    config.ballast.activations});
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
    }
  }
  if (world > 1 && config.zero.stage < 3) {
    // Whole weights on every rank: there are no parts that could wait below the device.
    for (Wish& wish : wishes) wish.weights = wish.weights.value_or(Tier::device);
  }
  return wishes;
}

Blueprint outline(const config::Config& config, const model::Architecture& model,
                  const memory::Budgets& budgets, Bytes workspace_bytes, std::uint32_t world) {
  Blueprint blueprint;
  blueprint.model = model;
  blueprint.type = config.bf16 ? DType::bf16 : DType::f32;
  blueprint.states = state_format(config);
  blueprint.shape = {config.batch.micro_batch, config.data.sequence_length};
  blueprint.micro_batches = config.batch.accumulation;
  blueprint.budgets = budgets;
  const std::uint64_t evaluation =
      std::clamp<std::uint64_t>(config.ballast.eval_batches, 1, blueprint.micro_batches);
  blueprint.workload =
      make_workload(blueprint.model, blueprint.type, blueprint.states, blueprint.shape,
                    blueprint.micro_batches, evaluation, workspace_bytes);
  blueprint.workload.world = world;
  blueprint.workload.stage = static_cast<std::uint32_t>(config.zero.stage);
  blueprint.options = schedule_options(config);
  return blueprint;
}

}  // namespace ballast::engine
