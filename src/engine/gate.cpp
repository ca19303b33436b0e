#include <cmath>
#include <cstring>
#include <span>
#include <vector>

#include "ballast/model/gradient_stats.h"

#include "src/engine/counts.h"
#include "src/engine/gate_inputs.h"
#include "src/engine/handlers.h"
#include "src/engine/report.h"

namespace ballast::engine {

using plan::Role;

namespace {

/// Sums over this rank's micro-batches.
model::PairResult own_losses(const CurrentOperation& at) {
  const HostBytes report = at.host(Role::losses, report_bytes(at.blueprint()));
  ReportPart part = head_losses_in(at.blueprint(), 0);
  part.bytes *= at.context.micro_batches;
  return add_losses(reported<const double>(report, part), at.blueprint().pairs);
}

/// One per block with a gradient.
std::vector<model::GradientStats> own_statistics(const CurrentOperation& at) {
  std::vector<model::GradientStats> own;
  for (const plan::Use& use : at.operation.uses) {
    if (use.role == Role::statistics) own.push_back(statistics_in(at, use.buffer));
  }
  return own;
}

}  // namespace

model::GradientStats statistics_in(const CurrentOperation& at, plan::BufferId buffer) {
  model::GradientStats found;
  std::memcpy(&found, at.modules().store.host(buffer, sizeof found).data(), sizeof found);
  return found;
}

/// Computes loss, global norm (blocks in order, in double) and DeepSpeed's clip coefficient:
/// norm' = (norm + 1e-6) / clip, coefficient = 1 / max(1, norm'). A gradient that is too large for
/// the loss scale is infinite in fp16, so it skips the step.
void run_gate(const CurrentOperation& at) {
  StepContext& context = at.context;
  if (at.has(Role::counts)) report_routing(at);
  const GateInputs all =
      sum_over_ranks(own_losses(at), own_statistics(at), at.sizes(), at.modules().ranks);
  context.result.pairs = mean_of(all.losses, context.divisor());
  context.result.loss = context.result.pairs.loss;
  if (!at.has(Role::statistics)) return;
  const double norm = std::sqrt(all.squares) / context.loss_scale;
  context.result.grad_norm = norm;
  context.result.skipped = all.non_finite != 0 || !std::isfinite(norm);
  // Eager updates do not wait for this and are not clipped.
  if (at.blueprint().options.update == step::Update::eager) return;
  const double clip = at.modules().gradient_clipping;
  const double excess = clip > 0.0 ? (norm + 1e-6) / clip : 0.0;
  if (!(excess > 1.0)) return;
  context.hyper.gradient_scale = static_cast<float>(1.0 / excess / context.loss_scale);
}

}  // namespace ballast::engine
