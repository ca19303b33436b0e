#include "ballast/step/plans.h"

#include <array>
#include <string>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "ballast/step/labels.h"

#include "src/step/layout.h"
#include "src/step/placed_problem.h"
#include "src/step/step_writer.h"

namespace ballast::step {

namespace {

BufferId first_of(const std::vector<BufferId>& buffers) {
  return buffers.empty() ? kNoBuffer : buffers.front();
}

/// Returns the inputs of the step on the host, by micro-batch.
std::vector<BufferId> inputs_on_host(const model::StepProgram& program, const Layout& layout) {
  for (model::ClassId id = 0; id < program.classes.size(); ++id) {
    if (program.classes[id].from_host) return layout.values.on_host[id];
  }
  return {};
}

Placement without_speculation(Placement placement) {
  for (BlockPlacement& block : placement.blocks) block.speculates = false;
  return placement;
}

/// Writes plans over the buffers of one layout.
class PlanMaker {
 public:
  /// `speculates`: whether speculating blocks of the placement do so in these plans. If not, their
  /// updates are gated, over the same buffers.
  PlanMaker(const Problem& problem, const Placement& placement, const Options& options,
            bool speculates = true)
      : placement_(speculates ? placement : without_speculation(placement)),
        placed_(problem, placement_, options),
        layout_(make_layout({problem, placement, options})) {}
  PlanMaker(const PlanMaker&) = delete;
  PlanMaker& operator=(const PlanMaker&) = delete;

  /// Returns a writer for one plan.
  [[nodiscard]] StepWriter write(const std::string& name, std::uint32_t micro_batches) const {
    return {name, placed_, layout_, micro_batches};
  }

  /// Call last: the buffers are then those of the schedule.
  void move_buffers_to(Schedule& schedule) {
    const Problem& problem = placed_.problem;
    schedule.ranks = problem.sharers;
    schedule.tensor = problem.tensor;
    schedule.ranks_in_group = RankSizes(problem).ranks_per_copy();
    schedule.micro_batch_tokens = problem.micro_batch_tokens;
    schedule.weight_staging = first_of(layout_.weight_staging);
    schedule.state_staging = first_of(layout_.state_staging);
    schedule.activation_staging = first_of(layout_.values.staging);
    schedule.gradient_staging = first_of(layout_.gradient_staging);
    schedule.batch_host = inputs_on_host(problem.program(), layout_);
    schedule.devices = problem.devices;
    for (const DevicePlaces& places : layout_.devices) {
      schedule.workspace.push_back(places.workspace);
    }
    schedule.weight_home = std::move(layout_.weight_home);
    schedule.trained_home = std::move(layout_.trained_home);
    schedule.state_home = std::move(layout_.state_home);
    schedule.buffers = std::move(layout_.buffers);
  }

 private:
  Placement placement_;
  PlacedProblem placed_;
  Layout layout_;
};

}  // namespace

Schedule build(const Problem& problem, const Placement& placement, const Options& options) {
  check_arguments(problem, placement, options);
  PlanMaker maker(problem, placement, options);
  Schedule schedule;
  if (options.purpose == Purpose::training) {
    const std::uint32_t micro_batches = problem.micro_batches;
    schedule.first = maker.write("first training step", micro_batches).training_step(false);
    schedule.steady =
        maker.write("training step", micro_batches).training_step(schedule.first.leaves_updates);
    schedule.flush = maker.write("updates", 0).flush();
    schedule.rollback = maker.write("rollback", 0).rollback();
  }
  schedule.evaluation = maker.write("evaluation", problem.evaluation_micro_batches).evaluation();
  maker.move_buffers_to(schedule);
  return schedule;
}

GatedPlans build_gated_plans(const Problem& problem, const Placement& placement,
                             const Options& options) {
  check_arguments(problem, placement, options);
  check_trains(options);
  const PlanMaker maker(problem, placement, options, false);
  const auto step = [&](bool applies_updates) {
    return maker.write("gated training step", problem.micro_batches).training_step(applies_updates);
  };
  return {.first = step(false),
          .steady = step(true),
          .flush = maker.write("updates of all blocks", 0).flush()};
}

Schedule build_steady_step(const Problem& problem, const Placement& placement,
                           const Options& options) {
  check_arguments(problem, placement, options);
  check_trains(options);
  PlanMaker maker(problem, placement, options);
  Schedule schedule;
  schedule.steady = maker.write("training step", problem.micro_batches).training_step(true);
  maker.move_buffers_to(schedule);
  return schedule;
}

std::vector<Buffer> list_buffers(const Problem& problem, const Placement& placement,
                                 const Options& options) {
  check_arguments(problem, placement, options);
  return std::move(make_layout({problem, placement, options}).buffers);
}

std::vector<Buffer> sum_buffers(const Problem& problem, const Placement& placement,
                                const Options& options) {
  check_arguments(problem, placement, options);
  return merged_buffers({problem, placement, options});
}

Plan build_partial_step(const Problem& problem, const Placement& placement, const Options& options,
                        std::uint32_t micro_batches, bool applies_updates, bool speculates) {
  check_arguments(problem, placement, options);
  check_trains(options);
  if (micro_batches == 0 || micro_batches > problem.micro_batches) {
    refuse_arguments(fmt::format("a partial step needs 1 to {} micro-batches, got {}",
                                 problem.micro_batches, micro_batches));
  }
  return PlanMaker(problem, placement, options, speculates)
      .write("training step", micro_batches)
      .training_step(applies_updates);
}

Plan build_fill(const Problem& problem, const Placement& placement, const Options& options,
                Homes homes) {
  check_arguments(problem, placement, options);
  return PlanMaker(problem, placement, options).write("initial fill", 0).fill(homes);
}

Plan build_read(const Problem& problem, const Placement& placement, const Options& options,
                std::uint32_t first, std::uint32_t count, Homes homes) {
  check_arguments(problem, placement, options);
  if (first > problem.blocks.size() || count > problem.blocks.size() - first) {
    refuse_arguments(fmt::format("the model has {} blocks; cannot read {} from block {} on",
                                 problem.blocks.size(), count, first));
  }
  return PlanMaker(problem, placement, options).write("reading", 0).read(first, count, homes);
}

namespace {

/// Returns the word for the data that an operation moves.
std::string_view object_of(const Operation& operation) {
  constexpr std::array<std::string_view, 7> kValues = {
      "batch", "activation", "routing", "losses", "rows", "gradient of rows", "gradient sum"};
  return operation.payload == Payload::value ? kValues.at(operation.label)
                                             : to_string(operation.payload);
}

}  // namespace

std::string OperationNames::kind_of(const Operation& operation) {
  switch (operation.action) {
    case Action::compute:
    case Action::exchange:
      return std::string(model::work_of(kernel_of(operation)));
    case Action::gate:
    case Action::update:
    case Action::update_on_device:
    case Action::initialize:
    case Action::read:
      return std::string(to_string(operation.action));
    default:
      return fmt::format("{} {}", to_string(operation.action), object_of(operation));
  }
}

std::string OperationNames::operator()(const Operation& operation) const {
  const std::string action = kind_of(operation);
  const bool initial = operation.action == Action::initialize || operation.action == Action::read;
  if (operation.action == Action::gate) return action + " (loss, norm, clipping)";
  if (moves(operation, MovedValue::losses)) return action;
  if (moves(operation, MovedValue::batch)) {
    return fmt::format("{}, micro-batch {}", action, operation.micro);
  }
  const std::string& block = block_of(operation);
  if (operation.grows_with_batch() && !initial) {
    return fmt::format("{} of {}, micro-batch {}{}", action, block, operation.micro,
                       is_reference(operation) ? " of the reference" : "");
  }
  const bool of_sub_group = operation.payload == Payload::states ||
                            operation.action == Action::update ||
                            operation.action == Action::update_on_device;
  if (of_sub_group && problem_->blocks[operation.block].sub_groups.size() > 1 && !initial) {
    return fmt::format("{} of {}, sub-group {}", action, block, operation.sub_group);
  }
  return fmt::format("{} of {}", action, block);
}

}  // namespace ballast::step
