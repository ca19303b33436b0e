#pragma once

#include <cstddef>
#include <exception>
#include <functional>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "ballast/planner/plan_request.h"

#include "src/planner/search.h"

namespace ballast::planner {

/// What a search learns about one point. A trial depends on nothing that the search decides in the
/// meantime, so several threads can compute trials ahead.
struct Trial {
  std::optional<Candidate> candidate;  ///< empty if the placement exceeds the budgets
  std::string key;                     ///< equal for points with the same schedule
  std::size_t operations = 0;          ///< operations of a step; 0 before it is built
  /// The speed that the busiest lane alone allows, in tokens per second; infinite if unknown.
  double bound = 0.0;
  bool simulated = false;
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
