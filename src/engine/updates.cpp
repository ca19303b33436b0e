#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

#include "ballast/comm/communicator.h"
#include "ballast/core/clocks.h"
#include "ballast/core/dtype.h"
#include "ballast/core/error.h"
#include "ballast/engine/blueprint.h"
#include "ballast/step/problem.h"

#include "src/engine/handlers.h"

namespace ballast::engine {

using plan::Role;

namespace {

/// Inputs of the gate's decision, summed over all ranks.
struct GateInputs {
  model::PairResult losses;   ///< over all counted targets; without pairs only the loss
  double balance_loss = 0.0;  ///< terms of the router losses of the step
  double router_z_loss = 0.0;
  double squares = 0.0;          ///< over all packed gradients
  std::uint64_t non_finite = 0;  ///< in packed gradients
};

constexpr std::array kLosses = {&model::PairResult::loss, &model::PairResult::chosen,
                                &model::PairResult::rejected, &model::PairResult::correct};

/// Sums the values that the head has reported for micro-batches: losses, or PairResults if `pairs`.
model::PairResult add_losses(std::span<const double> reported, bool pairs) {
  model::PairResult sum;
  for (std::size_t i = 0; i < reported.size(); ++i) {
    sum.*kLosses[pairs ? i % kLosses.size() : 0] += reported[i];
  }
  return sum;
}

/// `sum` divided by `count`.
model::PairResult mean_of(const model::PairResult& sum, double count) {
  model::PairResult mean = sum;
  for (const auto member : kLosses) mean.*member /= count;
  return mean;
}

/// Where the ranks' messages have the statistics of one whole block: at an index among the blocks
/// with a gradient, from the ranks of one tensor place.
struct StatisticsAt {
  std::size_t number = 0;  ///< BlockSpec::number
  std::size_t index = 0;
  std::uint32_t place = 0;
};

/// Returns the places of all whole blocks with a gradient, in the order of their numbers. Tensor
/// places have equal statistics of blocks without tiles.
std::vector<StatisticsAt> statistics_in_order(const Blueprint& blueprint) {
  std::vector<StatisticsAt> order;
  std::size_t index = 0;
  for (std::size_t b = 0; b < blueprint.model.blocks.size(); ++b) {
    if (blueprint.problem.blocks[b].is_frozen()) continue;
    const model::BlockSpec& block = blueprint.model.blocks[b];
    const bool in_tiles = blueprint.mesh.tensor > 1 && block.pieces > 1;
    for (std::uint32_t place = 0; place < (in_tiles ? blueprint.mesh.tensor : 1); ++place) {
      order.push_back({block.number + place * block.number_step, index, place});
    }
    ++index;
  }
  std::ranges::sort(order, {}, &StatisticsAt::number);
  return order;
}

/// Losses that a rank sends to all others.
struct RankLosses {
  model::PairResult head;
  double balance = 0.0;
  double router_z = 0.0;
};

/// Sums over all ranks: losses in rank order, squares by whole block in the order of shards. `own`:
/// statistics of this rank's shard of each block's gradient; empty in an evaluation. Exchanges them
/// if there are several ranks; with one rank, `ranks` may be null. Throws Error(comm).
GateInputs sum_over_ranks(const RankLosses& losses, const std::vector<GradientStats>& own,
                          const Blueprint& blueprint, comm::Ranks* ranks) {
  const step::RankSizes sizes(blueprint.problem);
  const Mesh& mesh = blueprint.mesh;
  // Each rank sends one message: the losses, then the statistics by block.
  const std::size_t bytes = sizeof losses + own.size() * sizeof(GradientStats);
  std::vector<std::byte> sent(bytes);
  std::memcpy(sent.data(), &losses, sizeof losses);
  std::ranges::copy(std::as_bytes(std::span(own)), sent.data() + sizeof losses);
  std::vector<std::byte> by_rank = sent;
  if (ranks != nullptr) {
    by_rank.resize(mesh.ranks() * bytes);
    ranks->all_gather(sent, by_rank);
  }
  const auto read = [&](std::size_t offset, auto value) {
    std::memcpy(&value, by_rank.data() + offset, sizeof value);
    return value;
  };
  GateInputs sums;
  // All tensor places have the losses.
  for (std::uint32_t sharer = 0; sharer < mesh.sharers(); ++sharer) {
    const auto one = read(mesh.rank_of(sharer, 0) * bytes, RankLosses());
    for (const auto member : kLosses) sums.losses.*member += one.head.*member;
    sums.balance_loss += one.balance;
    sums.router_z_loss += one.router_z;
  }
  if (own.empty()) return sums;
  for (const StatisticsAt& at : statistics_in_order(blueprint)) {
    for (std::uint32_t shard = 0; shard < mesh.sharers(); ++shard) {
      const std::size_t rank = mesh.rank_of(sizes.owner_of(shard), at.place);
      const auto one =
          read(rank * bytes + sizeof losses + at.index * sizeof(GradientStats), GradientStats());
      sums.squares += one.sum_of_squares;
      sums.non_finite += one.non_finite;
    }
  }
  return sums;
}

/// Sums over this rank's micro-batches.
model::PairResult own_losses(const CurrentOperation& at) {
  const std::vector<ReportPart> parts = report_parts(at.problem());
  const HostBytes report = at.host(Role::losses, parts.back().at(at.problem().micro_batches));
  return add_losses(parts.front().in(report, 0, at.context.micro_batches), at.blueprint().pairs);
}

/// Statistics of this rank, one per block with a gradient.
std::vector<GradientStats> own_statistics(const CurrentOperation& at) {
  std::vector<GradientStats> own;
  for (const plan::Use& use : at.operation.uses) {
    if (use.role == Role::statistics) own.push_back(statistics_in(at, use.buffer));
  }
  return own;
}

}  // namespace

GradientStats statistics_in(const CurrentOperation& at, plan::BufferId buffer) {
  GradientStats found;
  std::memcpy(&found, at.modules().store.host(buffer, sizeof found).data(), sizeof found);
  return found;
}

/// Computes loss, global norm (blocks in order, in double) and DeepSpeed's clip coefficient: norm'
/// = (norm + 1e-6) / clip, coefficient = 1 / max(1, norm'). A gradient that overflows with the loss
/// scale is infinite in fp16, so it skips the step.
void run_gate(const CurrentOperation& at) {
  StepContext& context = at.context;
  if (at.has(Role::counts)) report_routing(at);
  StepResult& result = context.result;
  const GateInputs all = sum_over_ranks({own_losses(at), result.balance_loss, result.router_z_loss},
                                        own_statistics(at), at.blueprint(), at.modules().ranks);
  if (at.problem().program().counts_step) {
    result.balance_loss = all.balance_loss;
    result.router_z_loss = all.router_z_loss;
  }
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

using plan::Speculation;

namespace {

/// Returns the sub-group of the operation. `buffer(role, bytes)`: the memory of a role.
template <class Buffer>
cpu_adam::Shard shard_of(const CurrentOperation& at, Buffer buffer, Role weights, Role states,
                         const std::byte* gradient) {
  const plan::Operation& op = at.operation;
  return make_shard(at.blueprint(), op.block, op.sub_group,
                    buffer(weights, at.sizes().updated_weights(op.block)),
                    buffer(states, at.sizes().states(op.block, op.sub_group)), gradient);
}

/// Returns the undo buffers in host memory; null for values on NVMe.
cpu_adam::Shard undo_shard(const CurrentOperation& at, const std::byte* gradient) {
  const auto buffer = [&](Role role, Bytes bytes) {
    return at.has(role) ? at.host(role, bytes).data() : nullptr;
  };
  return shard_of(at, buffer, Role::undo_weights, Role::undo_states, gradient);
}

/// Returns whether the update may run, by the gate's decision. Speculative and eager updates do not
/// wait for it. With eager updates other blocks may already be updated, so a gradient that is not
/// finite is an error.
bool is_allowed(const CurrentOperation& at) {
  if (at.operation.speculation == Speculation::speculates) return true;
  if (!at.has(Role::statistics)) return !at.context.result.skipped;
  if (statistics_in(at, at.operation.buffer(Role::statistics)).non_finite == 0) return true;
  throw Error(ErrorCategory::numeric,
              "the gradient is not finite, and later blocks are already updated; set "
              "ballast.update to \"gated\", which skips such steps, or lower the learning rate");
}

}  // namespace

void run_update(const CurrentOperation& at) {
  const auto buffer = [&](Role role, Bytes bytes) { return at.host(role, bytes).data(); };
  const std::byte* gradient =
      buffer(Role::gradient, at.sizes().updated_gradient(at.operation.block));
  const cpu_adam::Shard shard = shard_of(at, buffer, Role::weights, Role::states, gradient);
  const cpu_adam::Updater& updater = at.modules().updater;
  if (at.operation.speculation == Speculation::redoes) {
    updater.restore(at.context.hyper.optimizer, shard, undo_shard(at, gradient));
  }
  if (!is_allowed(at)) return;
  if (at.operation.speculation != Speculation::speculates) {
    const KernelClock clock(KernelGroup::update);
    return updater.step(at.context.hyper, shard);
  }
  // The gate's coefficient is not known yet.
  cpu_adam::Hyper assumed = at.context.hyper;
  assumed.gradient_scale = at.context.unclipped_scale();
  const KernelClock clock(KernelGroup::update);
  updater.step(assumed, shard, undo_shard(at, gradient));
}

void run_update_on_device(const CurrentOperation& at) {
  const auto buffer = [&](Role role, Bytes bytes) { return at.device(role, bytes).raw(); };
  const std::byte* gradient =
      buffer(Role::gradient, at.sizes().updated_gradient(at.operation.block));
  const cpu_adam::Shard shard = shard_of(at, buffer, Role::weights, Role::states, gradient);
  if (is_allowed(at)) at.own().update.step(at.stream(), at.context.hyper, shard);
}

}  // namespace ballast::engine
