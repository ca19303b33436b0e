#include "tools/bench/step_products.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "ballast/step/labels.h"

#include "tools/quantile.h"

namespace ballast::tools {
namespace {

/// Times all operations of `timeline` that compute the same products as the first operation of
/// `plan` with that kernel on `block`.
TimedPass time_pass(const plan::Timeline& timeline, const plan::Plan& plan, model::Kernel kernel,
                    std::uint32_t block) {
  const auto first = std::find_if(
      plan.operations.begin(), plan.operations.end(), [&](const plan::Operation& operation) {
        return step::runs(operation, kernel) && operation.block == block;
      });
  if (first == plan.operations.end()) return {};
  std::vector<double> seconds;
  for (const plan::Span& span : timeline.spans) {
    const plan::Operation& operation = span.operation();
    if (!step::runs(operation, kernel) || operation.flops != first->flops) continue;
    seconds.push_back(span.end - span.start);
  }
  TimedPass pass;
  pass.count = seconds.size();
  pass.seconds = quantile(seconds, 0.5);
  pass.flops = first->flops;
  return pass;
}

/// Returns the first layer of each number of products.
std::vector<std::uint32_t> kinds_of_layers(const engine::Blueprint& blueprint) {
  std::vector<std::uint32_t> kinds;
  std::vector<double> flops;
  for (std::uint32_t b = 0; b < blueprint.model.blocks.size(); ++b) {
    if (blueprint.model.blocks[b].kind != model::BlockKind::layer) continue;
    const double own =
        blueprint.model.forward_flops(b, blueprint.shape.sequences, blueprint.shape.length);
    if (std::find(flops.begin(), flops.end(), own) != flops.end()) continue;
    flops.push_back(own);
    kinds.push_back(b);
  }
  return kinds;
}

}  // namespace

double model_flops_of_step(const engine::Blueprint& blueprint) {
  double forward = 0.0;
  for (std::size_t b = 0; b < blueprint.model.blocks.size(); ++b) {
    forward += blueprint.model.forward_flops(b, blueprint.shape.sequences, blueprint.shape.length);
  }
  return 3.0 * static_cast<double>(blueprint.micro_batches) * forward;
}

std::vector<TimedPass> time_passes(const plan::Timeline& timeline,
                                   const engine::Blueprint& blueprint) {
  const auto& program = blueprint.problem.program();
  std::vector<TimedPass> passes;
  const auto add = [&](std::string name, std::string_view key, model::Kernel kernel,
                       std::uint32_t block) {
    TimedPass pass = time_pass(timeline, blueprint.schedule.steady, kernel, block);
    if (pass.count == 0) return;
    pass.name = std::move(name);
    pass.key = key;
    pass.block = blueprint.model.blocks[block].name;
    passes.push_back(std::move(pass));
  };
  const std::vector<std::uint32_t> kinds = kinds_of_layers(blueprint);
  for (const std::uint32_t layer : kinds) {
    const std::string name = kinds.size() == 1 ? "layer" : blueprint.model.blocks[layer].name;
    add(name + " forward", "layer_forward", model::Kernel::layer, layer);
    add(name + " backward", "layer_backward", model::Kernel::layer_backward, layer);
  }
  add("head fwd + bwd", "head", model::Kernel::head_train, program.head);
  return passes;
}

}  // namespace ballast::tools
