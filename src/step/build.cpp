#include "ballast/step/build.h"

#include <utility>

#include <fmt/format.h>

#include "src/step/arguments.h"
#include "src/step/layout.h"
#include "src/step/plan_types.h"
#include "src/step/step_writer.h"

namespace ballast::step {
namespace {

/// Writes plans over the buffers of one layout.
class PlanMaker {
 public:
  PlanMaker(const Workload& workload, const Placement& placement, const Options& options)
      : workload_(workload),
        question_(question_of(workload, placement, options)),
        layout_(make_layout(workload, placement, options)) {}

  /// A writer for one plan.
  [[nodiscard]] StepWriter write(const std::string& name, std::uint32_t micro_batches) const {
    return {name, workload_, question_, layout_, micro_batches};
  }
  [[nodiscard]] Layout& layout() { return layout_; }

 private:
  const Workload& workload_;
  ValueQuestion question_;
  Layout layout_;
};

BufferId first_of(const std::vector<BufferId>& buffers) {
  return buffers.empty() ? kNoBuffer : buffers.front();
}

/// Inputs of the step on the host, by micro-batch.
std::vector<BufferId> inputs_on_host(const model::StepProgram& program, const Layout& layout) {
  for (model::ClassId id = 0; id < program.classes.size(); ++id) {
    if (program.classes[id].from_host) return layout.values.on_host[id];
  }
  return {};
}

}  // namespace
}  // namespace ballast::step

namespace ballast::step {

using step::check_arguments;
using step::check_trains;
using step::Layout;
using step::make_layout;
using step::PlanMaker;
using step::refuse_arguments;

void set_program(Workload& workload, model::StepProgram program) {
  workload.values = std::make_shared<const step::ValueTable>(
      std::make_shared<const model::StepProgram>(std::move(program)));
}

const model::StepProgram& program_of(const Workload& workload) {
  return workload.values->program();
}

Schedule build(const Workload& workload, const Placement& placement, const Options& options) {
  check_arguments(workload, placement, options);
  PlanMaker maker(workload, placement, options);
  Schedule schedule;
  if (options.purpose == Purpose::training) {
    const std::uint32_t micro_batches = workload.micro_batches;
    schedule.first = maker.write("first training step", micro_batches).training_step(false);
    schedule.steady =
        maker.write("training step", micro_batches).training_step(schedule.first.leaves_updates);
    schedule.flush = maker.write("updates", 0).flush();
    schedule.rollback = maker.write("rollback", 0).rollback();
  }
  schedule.evaluation = maker.write("evaluation", workload.evaluation_micro_batches).evaluation();
  Layout& layout = maker.layout();
  schedule.ranks = workload.world;
  schedule.ranks_in_group = RankSizes(workload).group();
  schedule.micro_batch_tokens = workload.micro_batch_tokens;
  schedule.weight_staging = step::first_of(layout.weight_staging);
  schedule.state_staging = step::first_of(layout.state_staging);
  schedule.activation_staging = step::first_of(layout.values.staging);
  schedule.gradient_staging = step::first_of(layout.gradient_staging);
  schedule.batch_host = step::inputs_on_host(workload.values->program(), layout);
  schedule.workspace = layout.workspace;
  schedule.weight_home = std::move(layout.weight_home);
  schedule.trained_home = std::move(layout.trained_home);
  schedule.state_home = std::move(layout.state_home);
  schedule.buffers = std::move(layout.buffers);
  return schedule;
}

std::vector<Buffer> list_buffers(const Workload& workload, const Placement& placement,
                                 const Options& options) {
  check_arguments(workload, placement, options);
  return std::move(make_layout(workload, placement, options).buffers);
}

std::vector<Buffer> sum_buffers(const Workload& workload, const Placement& placement,
                                const Options& options) {
  check_arguments(workload, placement, options);
  return step::merged_buffers(workload, placement, options);
}

Plan build_partial_step(const Workload& workload, const Placement& placement,
                        const Options& options, std::uint32_t micro_batches, bool applies_updates) {
  check_arguments(workload, placement, options);
  check_trains(options);
  if (micro_batches == 0 || micro_batches > workload.micro_batches) {
    refuse_arguments(fmt::format("a partial step needs 1 to {} micro-batches, got {}",
                                 workload.micro_batches, micro_batches));
  }
  return PlanMaker(workload, placement, options)
      .write("training step", micro_batches)
      .training_step(applies_updates);
}

Plan build_fill(const Workload& workload, const Placement& placement, const Options& options,
                Homes homes) {
  check_arguments(workload, placement, options);
  return PlanMaker(workload, placement, options).write("initial fill", 0).fill(homes);
}

Plan build_read(const Workload& workload, const Placement& placement, const Options& options,
                std::uint32_t first, std::uint32_t count, Homes homes) {
  check_arguments(workload, placement, options);
  if (first > workload.blocks.size() || count > workload.blocks.size() - first) {
    refuse_arguments(fmt::format("the model has {} blocks; cannot read {} from block {} on",
                                 workload.blocks.size(), count, first));
  }
  return PlanMaker(workload, placement, options).write("reading", 0).read(first, count, homes);
}

}  // namespace ballast::step
