#include "tools/bench/step_products.h"

#include <algorithm>
#include <cstdint>

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
  const std::uint32_t head = blueprint.problem.program().head;
  const std::uint32_t layer = blueprint.problem.program().first_layer;
  std::vector<TimedPass> passes;
  const auto add = [&](std::string_view name, std::string_view key, model::Kernel kernel,
                       std::uint32_t block) {
    TimedPass pass = time_pass(timeline, blueprint.schedule.steady, kernel, block);
    if (pass.count == 0) return;
    pass.name = name;
    pass.key = key;
    passes.push_back(pass);
  };
  add("layer forward", "layer_forward", model::Kernel::layer, layer);
  add("layer backward", "layer_backward", model::Kernel::layer_backward, layer);
  add("head fwd + bwd", "head", model::Kernel::head_train, head);
  return passes;
}

}  // namespace ballast::tools
