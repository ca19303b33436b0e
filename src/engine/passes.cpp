#include "ballast/core/random.h"

#include "src/engine/arguments.h"
#include "src/engine/counts.h"
#include "src/engine/handlers.h"

// The passes of a model: the only file of the engine that tells kernels apart.

namespace ballast::engine {
namespace {

using model::Accumulation;
using model::Compute;
using model::Dropout;
using model::Kernel;

/// The same in the passes of a micro-batch, also after a resume.
Dropout dropout_of(const CurrentOperation& at) {
  if (is_reference(at.operation)) return {};
  const Blueprint& blueprint = at.blueprint();
  const std::uint64_t micro =
      std::uint64_t{at.operation.micro} * blueprint.workload.world + blueprint.rank;
  const auto step = static_cast<std::uint64_t>(at.context.hyper.step);
  return {.on = at.context.trains, .key = random_u64(at.modules().seed, step, micro)};
}

Accumulation accumulation_of(const CurrentOperation& at) {
  return at.operation.micro == 0 ? Accumulation::first : Accumulation::later;
}

void run_layer(const CurrentOperation& at, const PassBuffers& with) {
  const bool reference = is_reference(at.operation);
  at.modules().compute.layer_forward(
      at.stream(), at.operation.block, with.weights(), with.positions(), with.input(),
      with.output(), with.kept(), dropout_of(at),
      reference ? model::Subject::reference : model::Subject::trained);
}

void run_expert(const CurrentOperation& at, const PassBuffers& with) {
  Compute& compute = at.modules().compute;
  const std::uint32_t block = at.operation.block;
  switch (kernel_of(at.operation)) {
    case Kernel::expert:
      return compute.expert_forward(at.stream(), block, with.weights(), with.normed(),
                                    expert_choices(at), with.partial_sums(), with.output());
    case Kernel::expert_backward:
      return compute.expert_backward(at.stream(), block, with.weights(), with.normed(),
                                     expert_choices(at), with.flow(), with.partial_sums(),
                                     with.gradient());
    case Kernel::exchanged_expert:
      return compute.shared_experts_forward(at.stream(), block, with.weights(), with.normed(),
                                            shared_choices(at), *at.lanes.channels().rows,
                                            with.partial_sums(), with.output());
    default:
      return compute.shared_experts_backward(at.stream(), block, with.weights(), with.normed(),
                                             shared_choices(at), *at.lanes.channels().rows,
                                             with.flow(), with.partial_sums(), with.gradient());
  }
}

void run_head(const CurrentOperation& at, const PassBuffers& with) {
  Compute& compute = at.modules().compute;
  device::Stream& stream = at.stream();
  switch (kernel_of(at.operation)) {
    case Kernel::head_evaluate:
      return compute.head_forward(stream, with.weights(), with.tiles().front().weights,
                                  with.input(), with.targets(), with.head_losses());
    case Kernel::head_train:
      return compute.head_train(stream, with.weights(), with.tiles(), with.input(), with.targets(),
                                at.context.loss_gradient(), with.flow(), with.gradient(),
                                accumulation_of(at), with.head_losses(), with.kept());
    case Kernel::head_scan:
      return compute.head_scan(stream, with.tile(), with.targets(), with.normed(),
                               with.head_losses());
    case Kernel::head_differentiate:
      return compute.head_differentiate(
          stream, with.tile(), with.targets(), at.context.loss_gradient(), with.normed(),
          with.partial_sums(), accumulation_of(at), with.row_weights());
    default:
      return compute.head_end(stream, with.weights(), with.input(), with.targets(), with.normed(),
                              with.partial_sums(), with.flow(), with.gradient(), with.losses());
  }
}

void run_backward(const CurrentOperation& at, const PassBuffers& with) {
  Compute& compute = at.modules().compute;
  device::Stream& stream = at.stream();
  const std::uint32_t block = at.operation.block;
  switch (kernel_of(at.operation)) {
    case Kernel::embed_backward:
      return compute.embedding_backward(stream, block, with.tokens(), with.positions(), with.flow(),
                                        with.gradient());
    case Kernel::norm_backward:
      return compute.norm_backward(stream, block, with.weights(), with.input(), with.partial_sums(),
                                   with.flow(), with.gradient());
    case Kernel::router_backward:
      return compute.router_backward(stream, block, with.weights(), with.input(), with.normed(),
                                     with.partial_sums(), with.router_totals(),
                                     at.context.router_gradient(at.workload().world), with.flow(),
                                     with.gradient(), accumulation_of(at));
    case Kernel::tile_backward:
    case Kernel::shared_expert_backward:
      return compute.tile_backward(stream, block, with.weights(), with.positions(), with.normed(),
                                   with.flow(), with.partial_sums(), with.gradient(),
                                   accumulation_of(at));
    default:
      return compute.layer_backward(stream, block, with.weights(), with.positions(), with.input(),
                                    with.flow(), with.gradient(), accumulation_of(at), with.kept(),
                                    dropout_of(at));
  }
}

}  // namespace

void run_pass(const CurrentOperation& at) {
  Compute& compute = at.modules().compute;
  device::Stream& stream = at.stream();
  const std::uint32_t block = at.operation.block;
  const PassBuffers with(at);
  switch (kernel_of(at.operation)) {
    case Kernel::embed:
      return compute.embedding_forward(stream, block, with.weights(), with.tokens(),
                                       with.positions(), with.output());
    case Kernel::layer:
      return run_layer(at, with);
    case Kernel::norm:
      return compute.normalize(stream, block, with.weights(), with.input(), with.normed(),
                               with.partial_sums());
    case Kernel::tile:
    case Kernel::shared_expert:
      return compute.tile_forward(stream, block, with.weights(), with.positions(), with.normed(),
                                  with.partial_sums(), with.output());
    case Kernel::router:
      return compute.route(stream, block, with.weights(), with.input(), with.targets(),
                           with.normed(), with.partial_sums(), with.router_results());
    case Kernel::expert:
    case Kernel::expert_backward:
    case Kernel::exchanged_expert:
    case Kernel::exchanged_expert_backward:
      return run_expert(at, with);
    case Kernel::head_evaluate:
    case Kernel::head_train:
    case Kernel::head_scan:
    case Kernel::head_differentiate:
    case Kernel::head_end:
      return run_head(at, with);
    case Kernel::embed_backward:
    case Kernel::layer_backward:
    case Kernel::norm_backward:
    case Kernel::tile_backward:
    case Kernel::shared_expert_backward:
    case Kernel::router_backward:
      return run_backward(at, with);
  }
}

}  // namespace ballast::engine
