#include "src/step/placed_problem.h"

#include "ballast/step/deal.h"
#include "ballast/step/lives.h"

namespace ballast::step {

PlacedProblem::PlacedProblem(const Problem& problem, const Placement& placement,
                             const Options& options)
    : problem(problem),
      placement(placement),
      options(options),
      sizes(problem),
      form(in_one_pass(problem, placement) ? model::HeadForm::one_pass : model::HeadForm::visits) {
  if (problem.devices == 1) return;
  const model::StepProgram& program = problem.program();
  dealt = deal(program, problem.devices);
  evaluation_routes = Routes(program, stops_of(program.evaluation, model::HeadForm::visits), dealt);
  training_routes =
      trains() ? Routes(program, stops_of(program.training, form), dealt) : evaluation_routes;
}

std::vector<SwappedStates> PlacedProblem::swapped_states(UpdatedIn pass) const {
  std::vector<SwappedStates> swapped;
  for (std::uint32_t i = 0; i < blocks(); ++i) {
    const std::uint32_t b = pass == UpdatedIn::forward ? i : blocks() - 1 - i;
    if (at(b).optimizer != Tier::nvme || update_pass(b) != pass) continue;
    const auto groups = static_cast<std::uint32_t>(problem.blocks[b].sub_groups.size());
    for (std::uint32_t g = 0; g < groups; ++g) swapped.push_back({b, g});
  }
  return swapped;
}

}  // namespace ballast::step
