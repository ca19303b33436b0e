#include "src/planner/search_trials.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include "ballast/core/cpu.h"
#include "ballast/core/parallel.h"
#include "ballast/inputs/engine_inputs.h"

namespace ballast::planner {
namespace {

std::string key_of(std::uint64_t micro_batch, const step::Options& options,
                   const step::Placement& placement) {
  std::string key =
      fmt::format("{}/{}/{}/{}/{}/{}/{}/{}/", micro_batch, static_cast<int>(options.order),
                  options.buffers.weight_slots, options.buffers.gradient_slots,
                  options.buffers.weight_staging, options.buffers.state_staging,
                  options.buffers.activation_staging, options.buffers.gradient_staging);
  for (const auto& block : placement.blocks) {
    key += block.gradients == Tier::nvme ? 'g' : '.';
    key += static_cast<char>(
        '!' + 27 * static_cast<int>(block.kept) + 9 * static_cast<int>(block.weights) +
        3 * static_cast<int>(block.optimizer) + static_cast<int>(block.activations));
  }
  return key;
}

/// Returns the seconds per step of the busiest lane.
double busiest_seconds(const plan::Schedule& schedule, const plan::Rates& rates) {
  std::vector<double> seconds(plan::lane_count(schedule.devices));
  for (const plan::Operation& operation : schedule.steady.operations) {
    seconds.at(lane_number(operation)) += seconds_in_turn(operation, schedule, rates);
  }
  return *std::max_element(seconds.begin(), seconds.end());
}

void run_trial(const PlanRequest& request, const SearchPoint& point,
               const std::set<std::string>& seen, double best, Trial& trial) {
  stop_if_interrupted(request);
  const BatchChoice& choice = *point.choice;
  const step::Problem& problem = choice.outline.problem;
  Candidate candidate;
  candidate.point = point;
  candidate.placement = choice.filler.fill(point.recipe, point.options, &candidate.moved);
  if (choice.filler.excess(candidate.placement, point.options) > 0) return;
  trial.key = key_of(choice.micro_batch, point.options, candidate.placement);
  trial.candidate = std::move(candidate);
  trial.bound = std::numeric_limits<double>::infinity();
  if (seen.contains(trial.key)) return;
  const plan::Schedule schedule = step::build(problem, trial.candidate->placement, point.options);
  trial.operations = schedule.steady.operations.size();
  trial.bound =
      static_cast<double>(problem.tokens_per_step()) / busiest_seconds(schedule, request.rates);
  if (trial.bound < kTie * best) return;
  measure(request, schedule, *trial.candidate);
  trial.simulated = true;
}

}  // namespace

std::size_t search_threads(const PlanRequest& request) {
  constexpr std::size_t kMostThreads = 16;
  if (request.threads > 0) return request.threads;
  return std::min(static_cast<std::size_t>(usable_cpus()), kMostThreads);
}

void measure(const PlanRequest& request, const plan::Schedule& schedule, Candidate& candidate) {
  const step::Problem& problem = candidate.point.choice->outline.problem;
  const plan::Prediction prediction = plan::simulate(schedule, request.rates, kScreening);
  candidate.tokens_per_second =
      static_cast<double>(problem.tokens_per_step()) / prediction.step_seconds;
  const auto bytes = schedule.steady.bytes_by_lane();
  candidate.written = bytes[static_cast<std::size_t>(plan::Lane::writeback)];
  candidate.moved_bytes = std::accumulate(bytes.begin(), bytes.end(), Bytes{0});
  candidate.memory = schedule.bytes(Tier::device) + schedule.bytes(Tier::host);
}

std::vector<Trial> try_points(const PlanRequest& request, std::size_t threads,
                              std::span<const SearchPoint> points,
                              const std::set<std::string>& seen, double best) {
  std::vector<Trial> trials(points.size());
  run_in_parallel(points.size(), threads, [&](std::size_t i) {
    try {
      run_trial(request, points[i], seen, best, trials[i]);
    } catch (...) {
      trials[i].error = std::current_exception();
    }
  });
  return trials;
}

}  // namespace ballast::planner
