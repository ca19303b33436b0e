#include "ballast/step/deal.h"

#include <algorithm>

namespace ballast::step {

using model::BlockId;

namespace {

/// Returns whether the head multiplies with blocks of the embedding.
bool is_tied(const model::StepProgram& program) {
  return std::any_of(program.passes.begin(), program.passes.end(), [&](const model::Pass& pass) {
    if (pass.kernel == model::Kernel::head_scan && pass.block < program.first_layer) return true;
    return std::any_of(pass.operands.begin(), pass.operands.end(), [&](const auto& operand) {
      return operand.port == model::Port::output_weights && operand.number < program.first_layer;
    });
  });
}

}  // namespace

std::vector<std::uint8_t> deal(const model::StepProgram& program, std::uint32_t devices) {
  const auto blocks = static_cast<BlockId>(program.blocks.size());
  std::uint32_t layers = 0;
  for (BlockId b = program.first_layer; b < program.head; ++b) {
    layers = std::max(layers, program.blocks[b].layer + 1);
  }
  const bool tied = is_tied(program);
  const auto device_of = [&](BlockId b) -> std::uint32_t {
    if (program.is_layer(b)) return program.blocks[b].layer;
    if (b < program.first_layer) return b;
    // The norm is on the device of the first tile.
    return tied ? 0 : layers + (b == program.head ? 0 : b - program.head - 1);
  };
  std::vector<std::uint8_t> dealt;
  dealt.reserve(blocks);
  for (BlockId b = 0; b < blocks; ++b) {
    dealt.push_back(static_cast<std::uint8_t>(device_of(b) % devices));
  }
  return dealt;
}

}  // namespace ballast::step
