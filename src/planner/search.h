#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ballast/core/error.h"
#include "ballast/engine/blueprint.h"
#include "ballast/memory/machine.h"
#include "ballast/plan/simulator.h"
#include "ballast/planner/plan_request.h"

#include "src/planner/filling.h"

namespace ballast::planner {

/// Inputs of the schedule for one micro-batch size, before any placement.
struct BatchChoice {
  BatchChoice(const PlanRequest& request, std::uint64_t size);
  BatchChoice(const PlanRequest& request, const engine::BatchRule& batch);
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

/// Returns the micro-batch sizes in sequences that `request` allows, largest first. Throws
/// Error(config) for a batch that its ranks cannot share.
std::vector<std::uint64_t> micro_batch_sizes(const PlanRequest& request);

/// Levels for the numbers of buffers that a run leaves open.
enum class BufferLevel : std::uint8_t {
  usual,  ///< the numbers in the options
  few,    ///< one in host memory for each purpose
  fewest  ///< also one on the device: nothing is uploaded during computation
};
inline constexpr std::array kBufferLevels = {BufferLevel::usual, BufferLevel::few,
                                             BufferLevel::fewest};

step::Options with_buffers(const engine::RunInputs& run, step::Options options, BufferLevel number);

/// Concatenates two recipes.
PlacementRecipe concatenate(const PlacementRecipe& first, const PlacementRecipe& second);

/// Fills with the first of kBufferLevels that fits and then adds buffers while there is room. Open
/// gradients are on NVMe only if nothing fits with them on the host. `options` receives the options
/// used. If nothing fits, the result has the fewest buffers.
step::Placement fill_with_fewer_buffers(const TierFiller& filler, const PlacementRecipe& recipe,
                                        const engine::RunInputs& run, step::Options& options);

/// Returns the recipes that place_by_rule() tries, the usual one first.
std::vector<PlacementRecipe> rule_recipes(const engine::RunInputs& run);

/// Places everything that a run without choices (leaves_choices()) leaves open, without rates:
/// activations on the fastest tier with room for them, the last blocks first, gradients on the host
/// if they fit, then kept intermediates. The order is layer-major unless only another one fits or
/// is faster on any machine. `options` receives the options used. If the result exceeds the
/// budgets, nothing fits.
step::Placement place_by_rule(const TierFiller& filler, const engine::RunInputs& run,
                              step::Options& options);

/// Returns the recipes that are tried for every micro-batch size, the most promising first.
std::vector<PlacementRecipe> basic_recipes();
/// Adds variants with gradients on NVMe if host memory has no room for them, after or before
/// others.
std::vector<PlacementRecipe> with_swapped_gradients(const std::vector<PlacementRecipe>& recipes);
/// Returns whether the run leaves the tier of any gradient open.
bool opens_gradients(const engine::RunInputs& run);

/// Returns the orders that `run` leaves open, or that of `options`.
std::vector<step::Order> orders(const engine::RunInputs& run, const step::Options& options);
/// Returns further open orders, with gradient sums in host memory, for runs that fit with no other.
std::vector<step::Order> last_orders(const engine::RunInputs& run);

/// Returns the numbers of devices for each rank that `request` allows: the one that its run names,
/// or if that is open 1, 2, 4, ... and all.
std::vector<std::uint32_t> device_counts(const PlanRequest& request);

/// Returns the numbers of devices above the one that the run of `request` names, which would be
/// tried if it were open; empty if it is.
std::vector<std::uint32_t> larger_device_counts(const PlanRequest& request);

/// Returns `request` with that number of devices.
PlanRequest on_devices(PlanRequest request, std::uint32_t count);

/// Searches the placement, micro-batch size and buffer counts with the most tokens per second: the
/// basic recipes first, then variations of the best. The limit is on simulated operations instead
/// of time, so that equal requests have equal decisions.
class PlanSearch {
 public:
  explicit PlanSearch(const PlanRequest& request);

  /// Empty if nothing fits. Throws Error(config) if every placement that fits needs a rate that is
  /// missing.
  std::optional<Candidate> run();

  [[nodiscard]] std::size_t simulated() const { return simulated_; }

 private:
  void try_recipes(const std::vector<PlacementRecipe>& recipes, BufferLevel number,
                   bool with_last_orders);
  void try_closest_miss();
  void refine();
  void vary_buffers(const Candidate& candidate, std::vector<SearchPoint>& points) const;
  void vary_recipe(const Candidate& candidate, std::vector<SearchPoint>& points) const;
  void prefetch_experts(Candidate plan);
  void keep_attention(const Candidate& plan);
  void speculate(const Candidate& plan);
  [[nodiscard]] std::size_t max_speculating(const Candidate& plan) const;
  std::vector<std::pair<std::size_t, Candidate>> speculating(
      const Candidate& plan, const std::vector<std::size_t>& counts);
  /// Tries `points` in order, except those that `leaves_out`, given their index, after the results
  /// of the points before them. Several threads compute trials ahead, which changes no result.
  void attempt(std::span<const SearchPoint> points,
               const std::function<bool(std::size_t)>& leaves_out = nullptr);
  void judge(Trial trial);
  void count_simulation(std::size_t operations);
  /// Returns the choice for one of the sizes. It is made when it is first needed: its step program
  /// takes as long as the simulation of a plan.
  BatchChoice& choice_of(std::uint64_t micro_batch);
  [[nodiscard]] bool is_hopeless(std::uint64_t micro_batch, std::size_t recipe) const;
  [[nodiscard]] bool out_of_work() const;
  void record(Candidate candidate);
  [[nodiscard]] const Candidate* best() const;

  const PlanRequest& request_;
  std::size_t threads_;
  std::vector<std::uint64_t> sizes_;  ///< micro-batch sizes, largest first
  std::map<std::uint64_t, std::unique_ptr<BatchChoice>> choices_;  ///< by size
  std::vector<Candidate> candidates_;
  std::set<std::string> seen_;
  std::optional<Error> lacking_;  ///< the first error about a missing rate
  double best_tokens_per_second_ = 0.0;
  std::size_t simulated_ = 0;
  std::size_t work_ = 0;  ///< operations built and simulated
};

/// The plan with the smallest excess over the budgets among those that were tried.
struct ClosestMiss {
  Bytes excess = std::numeric_limits<Bytes>::max();
  std::uint64_t micro_batch = 0;
  step::Options options;
  PlacementRecipe recipe;
  memory::Ledger ledger;
};

/// quick: only the basic recipes, which may miss a plan that barely fits.
enum class Effort : std::uint8_t { quick, thorough };

/// If its excess is 0, try_decide() has a plan that fits. Needs no rates.
ClosestMiss find_closest_miss(const PlanRequest& request, Effort effort);

/// Returns `request` with changed settings; empty if the rules of configs forbid them.
std::optional<PlanRequest> changed(const PlanRequest& request, const Overrides& overrides);

/// Returns the first change of placement, micro-batch or number of devices with which a plan for
/// `request` fits; empty if none of those that are tried fits. Sets `missing_rate` to the message
/// about a rate without which this cannot be told.
Overrides find_fitting_change(const PlanRequest& request, std::string& missing_rate);

/// Returns the smallest change of the numbers of tiles with which a plan for `request` fits; empty
/// if there is none. Tiles of the vocabulary come first, then those of layers, then both.
Overrides find_fitting_tiles(const PlanRequest& request, const model::OpenTiles& open);

/// Like decide(), but empty if no plan fits.
std::optional<Decision> try_decide(const PlanRequest& request);

}  // namespace ballast::planner
