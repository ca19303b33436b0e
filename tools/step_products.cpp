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
  const schedule::BlockWork& work = blueprint.workload.blocks[block];
  const bool kept = blueprint.placement.blocks[block].keeps_intermediates;
  return {work.forward_flops, kept ? 0.0 : work.recomputed_flops};
}

/// The median over the operations of `timeline` with that action, on blocks like that one.
Pass time_pass(const schedule::Timeline& timeline, const engine::Blueprint& blueprint,
               Action action, std::size_t like) {
  const auto& blocks = blueprint.model.blocks;
  const auto& placed = blueprint.placement.blocks;
  std::vector<double> seconds;
  for (const schedule::Span& span : timeline.spans) {
    const schedule::Operation& operation = span.operation();
    if (operation.action != action || blocks[operation.block].kind != blocks[like].kind) continue;
    if (placed[operation.block].keeps_intermediates != placed[like].keeps_intermediates) continue;
    seconds.push_back(span.end - span.start);
  }
  Pass pass;
  pass.count = seconds.size();
  pass.seconds = quantile(seconds, 0.5);
  return pass;
}

}  // namespace

double model_flops_of_step(const engine::Blueprint& blueprint) {
  double forward = 0.0;
  for (const schedule::BlockWork& block : blueprint.workload.blocks) forward += block.forward_flops;
  return 3.0 * static_cast<double>(blueprint.micro_batches) * forward;
}

std::vector<Pass> time_passes(const schedule::Timeline& timeline,
                              const engine::Blueprint& blueprint) {
  const std::size_t head_block = blueprint.model.blocks.size() - 1;
  const BlockFlops layer = flops_of_block(blueprint, 1);
  const BlockFlops head = flops_of_block(blueprint, head_block);
  std::vector<Pass> passes;
  const auto add = [&](std::string_view name, std::string_view key, Action action, std::size_t like,
                       double flops) {
    Pass pass = time_pass(timeline, blueprint, action, like);
    if (pass.count == 0) return;
    pass.name = name;
    pass.key = key;
    pass.flops = flops;
    passes.push_back(pass);
  };
  add("layer forward", "layer_forward", Action::forward, 1, layer.forward);
  add("layer backward", "layer_backward", Action::backward, 1, 2.0 * layer.forward + layer.again);
  add("head, both", "head", Action::train_head, head_block, 3.0 * head.forward);
  return passes;
}

}  // namespace ballast::tools
