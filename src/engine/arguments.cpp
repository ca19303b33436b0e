#include "ballast/core/random.h"
#include "ballast/schedule/labels.h"

#include "src/engine/counts.h"
#include "src/engine/handlers.h"
#include "src/engine/report.h"

namespace ballast::engine {

using model::Kernel;
using model::Port;
using schedule::BufferId;
using schedule::Use;

namespace {

Port port_of(const Use& use) {
  return static_cast<Port>(static_cast<unsigned>(use.role) -
                           static_cast<unsigned>(schedule::Role::first_port));
}

/// The tile of the vocabulary in a block; 0 where there is none.
std::uint32_t tile_in(const schedule::Workload& work, std::uint32_t block) {
  if (work.is_embedding(block)) return work.tied ? block : 0;
  return work.tied || block < work.head() ? 0 : block - work.head();
}

/// Bytes of what the operation's pass finds at `port`.
Bytes bytes_at(const CurrentOperation& at, Port port) {
  const schedule::Workload& work = at.workload();
  switch (port) {
    case Port::weights:
      return at.work().whole_weight_bytes();
    case Port::batch:
      return work.batch_bytes;
    case Port::kept:
      return at.work().intermediate_bytes;
    case Port::normed:
      return work.rows_bytes;
    case Port::partial_sums:
      return work.row_sums_bytes;
    case Port::routing:
      return work.routing_bytes;
    case Port::router_totals:
      return work.router_totals_bytes;
    case Port::losses:
      return work.losses_bytes;
    case Port::pairs:
      return work.pairs_bytes;
    case Port::gradient:
      return at.work().accumulator_bytes;
    default:
      return work.activation_bytes;
  }
}

/// The place of the pass in the report.
ReportPart report_of(const CurrentOperation& at, Kernel kernel) {
  const bool router = kernel == Kernel::router;
  return router ? router_losses_in(at.blueprint(), at.operation.micro)
                : head_losses_in(at.blueprint(), at.operation.micro);
}

/// The same in the passes of a micro-batch, also after a resume.
model::Dropout dropout_of(const CurrentOperation& at) {
  const Blueprint& blueprint = at.blueprint();
  const std::uint64_t micro =
      std::uint64_t{at.operation.micro} * blueprint.workload.world + blueprint.rank;
  const auto step = static_cast<std::uint64_t>(at.context.hyper.step);
  return {.on = at.context.trains, .key = random_u64(at.modules().seed, step, micro)};
}

model::PassScalars scalars_of(const CurrentOperation& at, const model::Pass& pass) {
  const bool first = at.operation.micro == 0;
  const std::uint32_t ranks = at.workload().world;
  return {.accumulation = first ? model::Accumulation::first : model::Accumulation::later,
          .dropout = pass.reference > 0 ? model::Dropout() : dropout_of(at),
          .loss_gradient = at.context.loss_gradient(),
          .router_gradient = at.context.router_gradient(ranks),
          .preference = at.modules().preference,
          .shard = at.shard_number(),
          .ranks = ranks};
}

/// Sums of the gradient of the output matrix's tile `number` in `buffer`.
DeviceBytes gradient_of_tile(const CurrentOperation& at, BufferId buffer, std::size_t number) {
  const model::Architecture& model = at.blueprint().model;
  const model::VocabularyTile tile = model.tile(number);
  const Bytes rows = tile.rows * model.config.hidden_size * sizeof(float);
  const schedule::Workload& work = at.workload();
  return at.modules().store.device(buffer,
                                   work.tied ? rows : work.blocks[tile.block].accumulator_bytes);
}

/// The pass that a compute operation runs, with an operand per use.
model::Pass pass_of(const CurrentOperation& at) {
  model::Pass pass = {.kernel = kernel_of(at.operation),
                      .block = at.operation.block,
                      .reference = static_cast<std::uint8_t>(is_reference(at.operation)),
                      .number = tile_in(at.workload(), at.operation.block)};
  for (const Use& use : at.operation.uses) pass.operands.push_back({.port = port_of(use)});
  return pass;
}

/// What the operation binds to the ports of its pass, cut to the sizes of the operands.
model::PassArguments arguments_of(const CurrentOperation& at, const model::Pass& pass) {
  model::PassArguments arguments = {.scalars = scalars_of(at, pass),
                                    .exchange = at.lanes.channels().rows.get()};
  // A pass over all tiles finds the first one in its own block, unless the matrix is tied.
  const bool all = pass.kernel == Kernel::head_train && !at.workload().tied;
  const std::size_t tile = all ? 1 : pass.number;
  for (const Use& use : at.operation.uses) {
    const Port port = port_of(use);
    const auto view = [&] { return at.device(use, bytes_at(at, port)); };
    switch (port) {
      case Port::workspace:
        break;
      case Port::routing_counts:
        arguments.routing_counts = routing_of(at, use.buffer, at.operation.micro);
        break;
      case Port::batch:
        arguments.batch = model::BatchViews::cut(view(), at.blueprint().shape.tokens());
        break;
      case Port::losses: {
        const ReportPart part = report_of(at, pass.kernel);
        arguments[port] = view().subview(part.offset, part.bytes);
        break;
      }
      case Port::output_weights: {
        const std::size_t number = tile + arguments.output_weights.size();
        const std::size_t block = at.blueprint().model.tile(number).block;
        arguments.output_weights.push_back(
            at.modules().store.device(use.buffer, at.workload().blocks[block].weight_bytes));
        break;
      }
      case Port::output_gradient:
        arguments.output_gradient.push_back(
            gradient_of_tile(at, use.buffer, tile + arguments.output_gradient.size()));
        break;
      default:
        arguments[port] = view();
    }
  }
  return arguments;
}

}  // namespace

void run_pass(const CurrentOperation& at) {
  const model::Pass pass = pass_of(at);
  at.modules().compute.run(at.stream(), pass, arguments_of(at, pass));
}

}  // namespace ballast::engine
