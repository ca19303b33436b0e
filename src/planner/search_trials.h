#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "ballast/engine/blueprint.h"
#include "ballast/memory/budget.h"
#include "ballast/plan/simulator.h"
#include "ballast/planner/plan_request.h"

#include "src/planner/constraints.h"
#include "src/planner/filling.h"

namespace ballast::planner {

/// Inputs of the schedule for one micro-batch size, before any placement.
struct BatchChoice {
  BatchChoice(const PlanRequest& request, std::uint64_t size);
  BatchChoice(const BatchChoice&) = delete;
  BatchChoice& operator=(const BatchChoice&) = delete;

  std::uint64_t micro_batch;
  memory::Budgets budgets;
  engine::Blueprint outline;
  std::vector<PlacementConstraint> constraints;
  TierFiller filler;
  double best = 0.0;  ///< tokens per second
};

struct SearchPoint {
  BatchChoice* choice = nullptr;
  step::Options options;
  PlacementRecipe recipe;
};

/// A point that fits, with its simulated speed.
struct Candidate {
  SearchPoint point;
  step::Placement placement;
  std::vector<std::size_t> moved;  ///< blocks, by step of the recipe
  double tokens_per_second = 0.0;
  Bytes written = 0;      ///< bytes written to NVMe per step
  Bytes moved_bytes = 0;  ///< bytes moved on all lanes per step
  Bytes memory = 0;       ///< memory on device and host together
};

/// Throws Error(interrupted) after a signal.
void stop_if_interrupted(const PlanRequest& request);

/// The result of building and simulating a point. It depends on nothing that the search decides in
/// the meantime, so several threads can compute trials ahead.
struct Trial {
  std::optional<Candidate> candidate;  ///< empty if the placement exceeds the budgets
  std::string key;                     ///< equal for points with the same schedule
  std::size_t operations = 0;          ///< operations of a step; 0 before it is built
  /// The speed that the busiest lane alone allows, in tokens per second; infinite if unknown.
  double bound = 0.0;
  std::exception_ptr error;  ///< ended the trial
};

/// Returns the number of threads that compute trials of `request`.
std::size_t search_threads(const PlanRequest& request);

/// Simulation of a candidate's schedule, with which plans are compared.
inline constexpr plan::SimulationOptions kScreening = {.warm_up = 2, .measured = 2};
/// Plans within 0.1% of the fastest count as equally fast.
inline constexpr double kTie = 0.999;

/// Simulates `schedule` and sets the candidate's speed, memory and traffic.
void measure(const PlanRequest& request, const plan::Schedule& schedule, Candidate& candidate);

/// Computes trials with `threads` threads: fills a point's placement, builds its schedule and
/// simulates it, unless `seen` has its key or its bound is below kTie of `best`, in tokens per
/// second.
std::vector<Trial> try_points(const PlanRequest& request, std::size_t threads,
                              std::span<const SearchPoint> points,
                              const std::set<std::string>& seen, double best);

}  // namespace ballast::planner
