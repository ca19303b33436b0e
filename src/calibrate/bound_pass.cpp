#include "src/calibrate/bound_pass.h"

#include <algorithm>

#include "ballast/core/error.h"

namespace ballast::calibrate {

using model::Operand;
using model::OperandKind;
using model::Port;

std::vector<model::PassId> training_passes(const model::StepProgram& program) {
  const auto& stops = program.training;
  const bool visits = std::ranges::any_of(
      stops, [](const model::Stop& stop) { return stop.form == model::HeadForm::visits; });
  std::vector<model::PassId> order;
  for (const model::Stop& stop : stops) {
    if (visits && stop.form == model::HeadForm::one_pass) continue;
    order.insert(order.end(), stop.passes.begin(), stop.passes.end());
  }
  return order;
}

bool is_bound(const Operand& operand) {
  const bool kept = operand.port == Port::kept || operand.port == Port::kept_attention;
  return operand.kind != OperandKind::workspace && !(kept && operand.optional);
}

Bytes bytes_of(const Operand& operand, const model::StepProgram& program,
               const model::Architecture& model, DType type) {
  switch (operand.kind) {
    case OperandKind::weights:
      return model.blocks[operand.number].own_elements() * size_of(type);
    case OperandKind::rows: {
      const model::StepBlock& table = program.blocks[operand.number];
      return operand.access == model::OperandAccess::reads ? table.selected : table.row_gradients;
    }
    case OperandKind::value:
      return program.bytes_of(program.values[operand.number]);
    case OperandKind::gradient:
      return program.sums[operand.number].bytes;
    case OperandKind::workspace:
      break;
  }
  return 0;
}

model::PassArguments bind_pass(const model::Pass& pass, std::uint64_t tokens,
                               std::span<const DeviceBytes> memory) {
  expects(memory.size() == pass.operands.size(), "bind_pass: memory for other operands");
  model::PassArguments arguments;
  for (std::size_t i = 0; i < memory.size(); ++i) {
    if (memory[i].empty()) continue;
    switch (pass.operands[i].port) {
      case Port::routing_counts:
        break;
      case Port::batch:
        arguments.batch = model::BatchViews::cut(memory[i], tokens);
        break;
      case Port::output_weights:
        arguments.output_weights.push_back(memory[i]);
        break;
      case Port::output_gradient:
        arguments.output_gradient.push_back(memory[i]);
        break;
      default:
        arguments[pass.operands[i].port] = memory[i];
    }
  }
  return arguments;
}

}  // namespace ballast::calibrate
