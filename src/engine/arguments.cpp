#include <algorithm>
#include <array>
#include <vector>

#include "ballast/core/error.h"
#include "ballast/core/random.h"
#include "ballast/step/build.h"
#include "ballast/step/labels.h"

#include "src/engine/counts.h"
#include "src/engine/handlers.h"
#include "src/engine/report.h"
#include "src/engine/result_check.h"

namespace ballast::engine {

using model::Operand;
using model::OperandKind;
using model::Port;
using plan::Use;

namespace {

Port port_of(const Use& use) {
  return static_cast<Port>(static_cast<unsigned>(use.role) -
                           static_cast<unsigned>(plan::Role::first_port));
}

/// Returns the operand of a pass for its use number `place` of `port`, counted by port.
const Operand& operand_of(const model::Pass& pass, Port port, std::size_t place) {
  for (const Operand& operand : pass.operands) {
    if (operand.port == port && place-- == 0) return operand;
  }
  throw Error(ErrorCategory::state, "an operation binds a port that its pass does not have");
}

Bytes bytes_of(const CurrentOperation& at, const Operand& operand) {
  const model::StepProgram& program = at.problem().program();
  switch (operand.kind) {
    case OperandKind::weights:
      return at.problem().blocks[operand.number].whole_weight_bytes();
    case OperandKind::rows:
      return operand.access == model::OperandAccess::reads
                 ? program.blocks[operand.number].selected
                 : program.blocks[operand.number].row_gradients;
    case OperandKind::gradient:
      return program.sums[operand.number].bytes;
    case OperandKind::value:
      return program.bytes_of(program.values[operand.number]);
    case OperandKind::workspace:
      break;
  }
  return 0;
}

/// Returns the place of the pass's losses in the report of all micro-batches.
DeviceBytes place_in_report(const CurrentOperation& at, const Use& use, const Operand& operand) {
  const std::vector<ReportPart> parts = report_parts(at.problem());
  const model::ClassId of = at.problem().program().values[operand.number].of;
  const ReportPart& part = *std::ranges::find(parts, of, &ReportPart::of);
  const Bytes begin = part.at(at.operation.micro);
  return at.device(use, begin + part.bytes).subview(begin, part.bytes);
}

/// Returns the same mask for all passes of a micro-batch, also after a resume.
model::Dropout dropout_of(const CurrentOperation& at) {
  const Blueprint& blueprint = at.blueprint();
  const std::uint64_t micro =
      std::uint64_t{at.operation.micro} * blueprint.problem.sharers + blueprint.mesh.sharer();
  const auto step = static_cast<std::uint64_t>(at.context.hyper.step);
  return {.on = at.context.trains, .key = random_u64(at.modules().seed, step, micro)};
}

model::PassScalars scalars_of(const CurrentOperation& at, const model::Pass& pass) {
  const bool first = at.operation.micro == 0;
  const std::uint32_t ranks = at.problem().sharers;
  return {.accumulation = first ? model::Accumulation::first : model::Accumulation::later,
          .dropout = pass.reference > 0 ? model::Dropout() : dropout_of(at),
          .loss_gradient = at.context.loss_gradient(),
          .router_gradient = at.context.router_gradient(ranks),
          .preference = at.modules().preference,
          .shard = at.shard_number(),
          .ranks = ranks};
}

}  // namespace

model::PassArguments arguments_of(const CurrentOperation& at, const model::Pass& pass) {
  model::PassArguments arguments = {
      .correction_biases = at.modules().biases.of(pass.block),
      .scalars = scalars_of(at, pass),
      .exchange = at.channels().rows.get(),
      .sequence_part = {at.blueprint().mesh.sequence_place(), at.channels().heads.get()}};
  std::array<std::size_t, model::kPortCount> seen{};
  for (const Use& use : at.operation.uses) {
    const Port port = port_of(use);
    const Operand& operand = operand_of(pass, port, seen[static_cast<std::size_t>(port)]++);
    const auto view = [&] { return at.device(use, bytes_of(at, operand)); };
    switch (port) {
      case Port::workspace:
        break;  // see Compute::set_workspace()
      case Port::routing_counts:
        arguments.routing_counts = routing_of(at, use.buffer, at.operation.micro);
        break;
      case Port::losses:
        arguments[port] = place_in_report(at, use, operand);
        break;
      case Port::batch:
        arguments.batch = model::BatchViews::cut(view(), at.blueprint().shape.tokens(),
                                                 at.blueprint().shape.parts);
        break;
      case Port::output_weights:
        arguments.output_weights.push_back(view());
        break;
      case Port::output_gradient:
        arguments.output_gradient.push_back(view());
        break;
      default:
        arguments[port] = view();
    }
  }
  return arguments;
}

void run_pass(const CurrentOperation& at) {
  const model::Pass& pass = at.problem().program().passes[step::pass_id(at.operation)];
  const model::PassArguments arguments = arguments_of(at, pass);
  at.compute().run(at.stream(), pass, arguments);
  if (at.context.checks_results) check_results(at, pass, arguments);
}

}  // namespace ballast::engine
