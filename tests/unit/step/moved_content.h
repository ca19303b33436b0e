#pragma once

#include <cstdint>

#include "ballast/model/step_program.h"

#include "tests/unit/step/symbolic_memory.h"

namespace ballast::step {

inline Content weights_of(std::uint32_t block, std::uint64_t version, std::uint32_t groups = 0) {
  return {Content::What::weights, block, groups, version};
}
inline Content states_of(std::uint32_t block, std::uint32_t group, std::uint64_t version) {
  return {Content::What::states, block, group, version};
}

/// Returns whether an update changes the content.
inline bool is_updated(const Content& content) {
  return content.what == Content::What::weights || content.what == Content::What::decoded ||
         content.what == Content::What::states;
}

/// Returns whether `operation` says what it moves. `run`: that of the plan to which its data
/// belong.
inline bool belongs(const Operation& operation, const model::StepProgram& program,
                    const Content& content, std::uint64_t run) {
  using What = Content::What;
  switch (content.what) {
    case What::zeros:
      return true;
    case What::value:
    case What::counts: {
      const model::StepValue& value = program.values[content.number];
      const bool report = program.classes[value.of].buffers == model::BufferRule::report;
      const bool own = value.owner == operation.block && content.part == operation.micro;
      return content.version == run && (report || own);
    }
    case What::sum:
      return program.sums[content.number].block == operation.block && content.version == run;
    case What::gradient:
      return content.number == operation.block && content.version == run;
    case What::rows:
    case What::row_gradients:
      return content.number == operation.block && content.part == operation.micro;
    case What::states:
      return content.number == operation.block && content.part == operation.sub_group;
    default:
      return content.number == operation.block;
  }
}

}  // namespace ballast::step
