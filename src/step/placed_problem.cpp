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
  for_swapped_states(pass, [&](const SwappedStates& states) { swapped.push_back(states); });
  return swapped;
}

}  // namespace ballast::step
