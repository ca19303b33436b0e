#include "tools/step_products.h"

#include "tools/quantile.h"

namespace ballast::tools {
namespace {

using schedule::Action;

struct BlockFlops {
  double forward = 0.0;
  double again = 0.0;  ///< in the backward pass
};

/// Of one micro-batch.
BlockFlops flops_of_block(const engine::Blueprint& blueprint, std::size_t block) {
  const model::MicroBatchShape& shape = blueprint.shape;
  return {blueprint.model.forward_flops(block, shape.sequences, shape.length),
          blueprint.model.recomputed_flops(block, shape.sequences, shape.length)};
}

/// The median over the operations of `timeline` with that action, on a block of that kind.
Pass time_pass(const schedule::Timeline& timeline, const engine::Blueprint& blueprint,
               Action action, model::BlockKind kind) {
  std::vector<double> seconds;
  for (const schedule::Span& span : timeline.spans) {
    const schedule::Operation& operation = span.operation();
    if (operation.action != action) continue;
    if (blueprint.model.blocks[operation.block].kind != kind) continue;
    seconds.push_back(span.end - span.start);
  }
  Pass pass;
  pass.count = seconds.size();
  pass.seconds = quantile(seconds, 0.5);
  return pass;
}

}  // namespace

StepFlops flops_of_step(const engine::Blueprint& blueprint) {
  StepFlops step;
  for (std::size_t block = 0; block < blueprint.model.blocks.size(); ++block) {
    const BlockFlops flops = flops_of_block(blueprint, block);
    const auto times = static_cast<double>(blueprint.micro_batches);
    step.model += times * 3.0 * flops.forward;
    step.executed += times * (3.0 * flops.forward + flops.again);
  }
  return step;
}

std::vector<Pass> time_passes(const schedule::Timeline& timeline,
                              const engine::Blueprint& blueprint) {
  const BlockFlops layer = flops_of_block(blueprint, 1);
  const BlockFlops head = flops_of_block(blueprint, blueprint.model.blocks.size() - 1);
  std::vector<Pass> passes;
  const auto add = [&](std::string_view name, std::string_view key, Action action,
                       model::BlockKind kind, double flops) {
    Pass pass = time_pass(timeline, blueprint, action, kind);
    if (pass.count == 0) return;
    pass.name = name;
    pass.key = key;
    pass.flops = flops;
    passes.push_back(pass);
  };
  add("layer forward", "layer_forward", Action::forward, model::BlockKind::layer, layer.forward);
  add("layer backward", "layer_backward", Action::backward, model::BlockKind::layer,
      2.0 * layer.forward + layer.again);
  add("head, both", "head", Action::train_head, model::BlockKind::head, 3.0 * head.forward);
  return passes;
}

}  // namespace ballast::tools
