#pragma once

#include <memory>
#include <utility>

#include "ballast/step/build.h"

#include "tests/unit/step/shape_of_workload.h"

namespace ballast::step {

/// The sizes of a workload with the passes of `program`.
inline Problem with_program(const Workload& workload, model::StepProgram program) {
  Problem problem = {.table = std::make_shared<const ProgramTable>(std::move(program)),
                     .statistics_bytes = workload.statistics_bytes,
                     .workspace_bytes = workload.workspace_bytes,
                     .micro_batch_tokens = workload.micro_batch_tokens,
                     .micro_batches = workload.micro_batches,
                     .evaluation_micro_batches = workload.evaluation_micro_batches,
                     .world = workload.world,
                     .stage = workload.stage,
                     .weight_ranks = workload.weight_ranks,
                     .coded_weight = workload.coded_weight};
  for (const BlockWork& block : workload.blocks) {
    problem.blocks.push_back({.weight_bytes = block.weight_bytes,
                              .decoded_bytes = block.decoded_bytes,
                              .gradient_bytes = block.gradient_bytes,
                              .keeps_whole = block.keeps_whole,
                              .sub_groups = block.sub_groups});
  }
  return problem;
}

/// A workload of a test with the passes that its flags and sizes describe.
inline Problem with_program(const Workload& workload) {
  return with_program(workload, model::write_program(shape_of(workload)));
}

}  // namespace ballast::step
