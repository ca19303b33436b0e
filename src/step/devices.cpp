#include "src/step/devices.h"

#include <algorithm>

#include "ballast/plan/plan.h"
#include "ballast/step/program_index.h"

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

using model::Operand;
using model::OperandAccess;
using model::OperandKind;
using model::PassId;
using model::ValueId;

namespace {

/// Returns whether a pass finds the operand in memory of its device.
bool is_on_device(const model::StepProgram& program, const Operand& operand) {
  return operand.kind == OperandKind::value && !is_on_host(program, operand);
}

}  // namespace

Routes::Routes(const model::StepProgram& program, const std::vector<const model::Stop*>& stops,
               const std::vector<std::uint8_t>& device_of)
    : copies_(program.passes.size()),
      leaving_(program.passes.size()),
      devices_(program.values.size(), 0),
      left_(program.values.size(), 0),
      stays_(program.values.size(), 0) {
  // Backwards: the devices that read a value later, until it is written again.
  std::vector<Devices> readers(program.values.size(), 0);
  const auto write = [&](PassId pass, ValueId value, std::uint8_t device, bool begins) {
    const auto own = static_cast<Devices>(1U << device);
    for (std::uint8_t to = 0; to < plan::kMaxDevices; ++to) {
      if (to != device && (readers[value] >> to & 1U) != 0) copies_[pass].push_back({value, to});
    }
    const bool leaves = readers[value] != 0 && (readers[value] & own) == 0;
    if (leaves && begins) {
      leaving_[pass].push_back(value);
      left_[value] |= own;
    } else {
      stays_[value] |= own;
    }
    devices_[value] |= own;
    readers[value] = 0;
  };
  for (auto stop = stops.rbegin(); stop != stops.rend(); ++stop) {
    const std::vector<PassId>& passes = (*stop)->passes;
    for (auto id = passes.rbegin(); id != passes.rend(); ++id) {
      const model::Pass& pass = program.passes[*id];
      const std::uint8_t device = device_of[pass.block];
      for (const Operand& operand : pass.operands) {
        if (!is_on_device(program, operand) || operand.access == OperandAccess::reads) continue;
        write(*id, operand.number, device, operand.access == OperandAccess::writes);
      }
      for (const Operand& operand : pass.operands) {
        if (!is_on_device(program, operand) || operand.access == OperandAccess::writes) continue;
        readers[operand.number] |= static_cast<Devices>(1U << device);
        devices_[operand.number] |= static_cast<Devices>(1U << device);
        stays_[operand.number] |= static_cast<Devices>(1U << device);
      }
    }
  }
}

bool Routes::leaves(PassId pass, ValueId value) const {
  if (leaving_.empty()) return false;
  const std::vector<ValueId>& leaving = leaving_[pass];
  return std::find(leaving.begin(), leaving.end(), value) != leaving.end();
}

}  // namespace ballast::step
