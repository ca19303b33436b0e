#pragma once

#include <cstdint>
#include <set>
#include <vector>

#include "ballast/step/program_index.h"

namespace ballast::step {

/// The devices whose passes use a value.
struct ValueDevices {
  std::set<std::uint8_t> writers;
  std::set<std::uint8_t> readers;
  std::size_t copies = 0;  ///< between devices, for one micro-batch
};

/// The result of a pass is copied once to each other device on which it is read. `dealt`: the
/// device of each block.
inline ValueDevices devices_of(const model::StepProgram& program, model::ValueId value,
                               const std::vector<const model::Stop*>& stops,
                               const std::vector<std::uint8_t>& dealt) {
  ValueDevices found;
  std::set<std::uint8_t> there;  // devices that have the value as it is
  for (const model::Stop* stop : stops) {
    for (const model::PassId id : stop->passes) {
      const std::uint8_t device = dealt[program.passes[id].block];
      for (const model::Operand& operand : program.passes[id].operands) {
        if (operand.kind != model::OperandKind::value || operand.number != value) continue;
        if (is_on_host(program, operand)) continue;
        const bool written = !there.empty();
        if (operand.access != model::OperandAccess::writes) {
          found.readers.insert(device);
          found.copies += written && !there.contains(device) ? 1 : 0;
          if (written) there.insert(device);
        }
        if (operand.access == model::OperandAccess::reads) continue;
        found.writers.insert(device);
        there = {device};
      }
    }
  }
  return found;
}

}  // namespace ballast::step
