#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include <fmt/format.h>

#include "ballast/comm/communicator.h"
#include "ballast/core/dtype.h"
#include "ballast/core/error.h"
#include "ballast/core/random.h"
#include "ballast/model/compute.h"
#include "ballast/model/step_program.h"
#include "ballast/step/labels.h"
#include "ballast/step/plans.h"

#include "src/engine/handlers.h"
#include "src/model/compute/routing.h"

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
  const std::uint32_t parts =
      at.problem().program().counts_step ? 1 : at.context.micro_batches * ranks;
  return {.accumulation = first ? model::Accumulation::first : model::Accumulation::later,
          .dropout = pass.reference > 0 ? model::Dropout() : dropout_of(at),
          .loss_gradient = at.context.loss_gradient(),
          .router_gradient = at.context.router_gradient(parts),
          .preference = at.modules().preference,
          .shard = at.shard_number(),
          .ranks = ranks};
}

}  // namespace

model::PassArguments arguments_of(const CurrentOperation& at, const model::Pass& pass) {
  model::PassArguments arguments = {
      .correction_biases = at.modules().side.of(kCorrectionBiases, pass.block),
      .scalars = scalars_of(at, pass),
      .exchange = at.channels().rows.get(),
      .sequence_slice = {at.blueprint().mesh.sequence_place(), at.channels().heads.get()}};
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
      case Port::all_routing_counts:
        for (std::uint32_t m = 0; m < at.context.micro_batches; ++m) {
          arguments.all_routing_counts.push_back(routing_of(at, use.buffer, m));
        }
        break;
      case Port::losses:
        arguments[port] = place_in_report(at, use, operand);
        break;
      case Port::batch:
        arguments.batch = model::BatchViews::cut(view(), at.blueprint().shape.tokens(),
                                                 at.blueprint().shape.slices);
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

using plan::BufferId;
using plan::Role;

namespace {

model::RoutingCounts counts_in(const CurrentOperation& at, BufferId counts, std::uint32_t micro) {
  return {routing_of(at, counts, micro), at.problem().sharers};
}

const model::BlockSpec& block_of(const CurrentOperation& at) {
  return at.blueprint().own().blocks[at.operation.block];
}

bool holds(const CurrentOperation& at, const plan::Condition& condition) {
  using Rows = plan::Condition::Rows;
  if (condition.always()) return true;
  const model::BlockSpec& block = block_of(at);
  const std::uint64_t expert = model::RoutingCounts::expert_in(block, at.shard_number());
  if (condition.rows == Rows::in_step_before) {
    const auto& rows = at.before.result.expert_rows;
    return !rows.empty() && rows[block.layer][expert] > 0;
  }
  const bool one = condition.rows == Rows::in_micro_batch;
  const std::uint32_t first = one ? condition.micro : 0;
  const std::uint32_t end = one ? condition.micro + 1 : at.context.micro_batches;
  const std::uint32_t ranks = condition.any_rank ? at.problem().sharers : 1;
  // The counts of the trained model, followed by those of the reference model.
  for (const Use& use : at.operation.uses) {
    if (use.role != Role::counts) continue;
    for (std::uint32_t m = first; m < end; ++m) {
      const model::RoutingCounts counts = counts_in(at, use.buffer, m);
      for (std::uint32_t r = 0; r < ranks; ++r) {
        const std::uint32_t rank = condition.any_rank ? r : at.shard_number();
        if (counts.choices(rank, expert).count > 0) return true;
      }
    }
    if (!condition.any_model) break;
  }
  return false;
}

}  // namespace

Bytes counts_of_micro_batch(const step::Problem& problem) {
  return problem.sharers * problem.index->routing_bytes();
}

HostBytes counts_of_micro_batch(const step::Problem& problem, state::Store& store, BufferId counts,
                                std::uint32_t micro) {
  const Bytes bytes = counts_of_micro_batch(problem);
  return store.host(counts, (micro + 1) * bytes).subspan(micro * bytes);
}

std::span<const std::int32_t> routing_of(const CurrentOperation& at, BufferId counts,
                                         std::uint32_t micro) {
  const HostBytes all = counts_of_micro_batch(at.problem(), at.modules().store, counts, micro);
  return {reinterpret_cast<const std::int32_t*>(all.data()), all.size() / sizeof(std::int32_t)};
}

bool has_work(const CurrentOperation& at) {
  const plan::Operation& operation = at.operation;
  return holds(at, operation.condition) && !(operation.unless && holds(at, *operation.unless));
}

void report_routing(const CurrentOperation& at) {
  const step::Problem& problem = at.problem();
  const step::ProgramIndex& index = *problem.index;
  const std::uint32_t micro_batches = at.context.micro_batches;
  StepResult& result = at.context.result;
  result.expert_rows.assign(at.blueprint().own().config.num_layers, {});
  auto routing = index.values().reported_counts.begin();
  // The counts are in the order of the routers.
  for (const plan::Use& use : at.operation.uses) {
    if (use.role != Role::counts) continue;
    const model::BlockId end = index.counting_in(*routing++).end;
    const model::BlockSpec& last = at.blueprint().own().blocks[end - 1];
    std::vector<std::uint64_t>& rows = result.expert_rows[last.layer];
    rows.resize(last.expert + last.pieces);
    for (std::uint32_t i = 0; i < micro_batches * problem.sharers; ++i) {
      const model::RoutingCounts counts = counts_in(at, use.buffer, i / problem.sharers);
      for (std::size_t e = 0; e < rows.size(); ++e) {
        rows[e] += counts.choices(i % problem.sharers, e).count;
      }
    }
  }
  const ReportPart part = report_parts(problem).back();
  const HostBytes report = at.host(Role::losses, part.at(problem.micro_batches));
  // Terms of the losses of the step, or losses of which the mean is reported.
  const std::uint32_t parts = problem.program().counts_step ? 1 : micro_batches;
  for (std::uint32_t m = 0; m < micro_batches; ++m) {
    const auto losses = part.in(report, m);
    result.balance_loss += losses[0] / parts;
    result.router_z_loss += losses[1] / parts;
  }
}

}  // namespace ballast::engine

// Passes between the ranks that share the tiles of each matrix.

namespace ballast::engine {

using model::Port;

namespace {

/// Adds what the tiles of all tensor places have computed: in the forward pass after the input of
/// the half, in the order of the tiles; gradients in the opposite order.
void sum_tiles(const CurrentOperation& at, const model::Pass& pass) {
  const model::PassArguments arguments = arguments_of(at, pass);
  const bool gradients = !arguments[Port::normed_gradient].empty();
  const Blueprint& blueprint = at.blueprint();
  const Elems elements = blueprint.shape.tokens() * blueprint.model.config.hidden_size;
  // Terms of the embedding are activations.
  const bool embedding = blueprint.own().blocks[pass.block].kind == model::BlockKind::embedding;
  const comm::OrderedSum sum = {.elements = elements,
                                .terms = pass.number,
                                .term_type = embedding ? blueprint.type : DType::f32,
                                .type = blueprint.type,
                                .descending = gradients};
  const DeviceBytes out = arguments[gradients ? Port::normed_gradient : Port::output];
  at.channels().tensor->sum_terms(
      *at.channels().stream, sum, arguments[Port::terms].subview(0, sum.bytes_of_terms()),
      arguments[Port::input], out.subview(0, sum.bytes()), arguments[Port::received]);
}

void share_row_sums(const CurrentOperation& at, const model::Pass& pass) {
  const model::PassArguments arguments = arguments_of(at, pass);
  at.channels().tensor->all_gather(*at.channels().stream, arguments[Port::row_sums],
                                   arguments[Port::all_row_sums]);
}

}  // namespace

void run_exchange(const CurrentOperation& at) {
  const model::Pass& pass = at.problem().program().passes[step::pass_id(at.operation)];
  if (pass.kernel == model::Kernel::share_row_sums) {
    share_row_sums(at, pass);
  } else {
    sum_tiles(at, pass);
  }
}

namespace {

constexpr Bytes kPiece = 16 * kMiB;

/// Searches the results of one port.
class ResultSearch {
 public:
  ResultSearch(const CurrentOperation& at, Port port) : at_(at), port_(port) {}

  /// `width`: elements per row, or 0.
  template <class T>
  void run(ConstDeviceBytes values, std::size_t width) {
    std::vector<std::byte> piece(std::min<Bytes>(kPiece, values.size()));
    for (Bytes done = 0; done < values.size();) {
      const Bytes size = std::min<Bytes>(piece.size(), values.size() - done);
      at_.own().device.copy_to_host(at_.stream(), HostBytes(piece).first(size),
                                    values.subview(done, size));
      at_.stream().synchronize();
      search(std::span(reinterpret_cast<const T*>(piece.data()), size / sizeof(T)),
             done / sizeof(T));
      done += size;
    }
    if (count_ > 0) refuse(values.size() / sizeof(T), width);
  }

 private:
  template <class T>
  void search(std::span<const T> values, std::size_t first_number) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double value = model::to_double(values[i]);
      if (std::isfinite(value)) continue;
      if (count_++ > 0) continue;
      first_ = first_number + i;
      value_ = value;
    }
  }
  [[noreturn]] void refuse(std::size_t all, std::size_t width) const {
    const std::string place =
        width == 0 ? fmt::format("number {}", first_)
                   : fmt::format("in row {}, column {}", first_ / width, first_ % width);
    throw Error(ErrorCategory::numeric,
                fmt::format("{} of {} values of its {} are not finite; the first, {}, is {}",
                            count_, all, to_string(port_), value_, place));
  }

  const CurrentOperation& at_;
  Port port_;
  std::size_t count_ = 0;
  std::size_t first_ = 0;
  double value_ = 0.0;
};

}  // namespace

void check_results(const CurrentOperation& at, const model::Pass& pass,
                   const model::PassArguments& arguments) {
  const DType type = at.blueprint().type;
  const std::size_t width = at.blueprint().model.config.hidden_size;
  std::size_t tile = 0;
  for (const model::Operand& operand : pass.operands) {
    const model::PortNumbers numbers = model::numbers_of(operand.port);
    if (numbers == model::PortNumbers::none || operand.access == model::OperandAccess::reads) {
      continue;
    }
    const bool may_overflow = operand.port != Port::output && operand.port != Port::losses;
    if (type == DType::f16 && may_overflow) continue;
    DeviceBytes values = arguments[operand.port];
    if (operand.port == Port::output_gradient) {
      if (tile == arguments.output_gradient.size()) continue;
      values = arguments.output_gradient[tile++];
    }
    const bool in_rows = numbers == model::PortNumbers::of_training;
    model::with_numbers(operand.port, type, [&](auto of_type) {
      ResultSearch(at, operand.port).run<decltype(of_type)>(values, in_rows ? width : 0);
    });
  }
}

}  // namespace ballast::engine
