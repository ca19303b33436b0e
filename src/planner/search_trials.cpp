#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/core/machine.h"
#include "ballast/core/threads.h"
#include "ballast/device/device.h"

#include "src/planner/search.h"

namespace ballast::planner {
namespace {

/// Returns the memory of the kernels for micro-batches of that shape. A program
/// built without CUDA estimates it with the host device's kernels on one thread.
model::KernelSizes kernels_of(const PlanRequest& request, const model::MicroBatchShape& shape) {
  if (request.kernels) return request.kernels(shape);
  const engine::RunInputs& run = request.run;
  const bool on_host = request.rates.forward.empty()
                           ? device::shares_host_cores(run.devices.first())
                           : request.rates.shared_cores > 0;
  const char* const device = on_host || !device::cuda_built_in() ? "host" : "cuda";
  const int threads = on_host ? run.devices.compute_threads : 1;
  const model::ModelConfig& model = run.model.config;
  const std::string question =
      fmt::format("{} {} {} on {}, {} threads; {} {} {} {}", shape.sequences, shape.length,
                  shape.slices, device, threads, run.model.split.experts, model.vocabulary_tiles,
                  model.layer_tiles, to_string(run.type));
  return request.known_kernels->of(
      question, [&] { return model::kernel_memory(run.model, run.type, shape, device, threads); });
}

/// Returns a key that is equal for points with the same schedule.
std::string key_of(std::uint64_t micro_batch, const step::Options& options,
                   const step::Placement& placement) {
  std::string key = fmt::format("{} {} ", micro_batch, describe(options));
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
  const plan::Schedule schedule =
      step::build_steady_step(problem, trial.candidate->placement, point.options);
  trial.operations = schedule.steady.operations.size();
  trial.bound =
      static_cast<double>(problem.tokens_per_step()) / busiest_seconds(schedule, request.rates);
  if (trial.bound < kTie * best) return;
  measure(request, schedule, *trial.candidate);
}

}  // namespace

BatchChoice::BatchChoice(const PlanRequest& request, std::uint64_t size)
    : BatchChoice(request, request.run.batch.with_samples(size, request.mesh.data)) {}

BatchChoice::BatchChoice(const PlanRequest& request, const engine::BatchRule& batch)
    : micro_batch(batch.samples()),
      budgets(request.budgets),
      outline(engine::outline(request.run, batch, request.budgets, kernels_of(request, batch.shape),
                              request.mesh)),
      constraints(read_constraints(request.run)),
      filler(outline.problem, constraints, budgets,
             request.run.constraints.speculative_updates.value_or(0)) {}

void stop_if_interrupted(const PlanRequest& request) {
  if (request.interrupted == nullptr || !*request.interrupted) return;
  throw Error(ErrorCategory::interrupted, "interrupted while planning");
}

std::size_t search_threads(const PlanRequest& request) {
  constexpr std::size_t kMaxThreads = 16;
  if (request.threads > 0) return request.threads;
  return std::min(static_cast<std::size_t>(usable_cpus()), kMaxThreads);
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
