#include "ballast/plan/simulator.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/plan/rates.h"

#include "src/plan/simulator_sharing.h"

namespace ballast::plan {

double tokens_to_hide(double bytes_per_parameter, double flops_per_second,
                      double bytes_per_second) {
  expects(bytes_per_parameter > 0.0 && flops_per_second > 0.0 && bytes_per_second > 0.0,
          "tokens_to_hide: bytes, FLOP/s and bandwidth must be above 0");
  return bytes_per_parameter / kFlopsPerParameterAndToken * flops_per_second / bytes_per_second;
}

namespace {

struct Edge {
  OpId from;
  OpId to;
};

/// The operations that wait for each operation.
class Followers {
 public:
  Followers() = default;

  /// All edges start at operations below `count`.
  Followers(std::size_t count, const std::vector<Edge>& edges)
      : begin_(count + 1, 0), ids_(edges.size()) {
    for (const Edge& edge : edges) ++begin_[edge.from + 1];
    for (std::size_t i = 0; i < count; ++i) begin_[i + 1] += begin_[i];
    std::vector<std::size_t> next(begin_.begin(), begin_.end() - 1);
    for (const Edge& edge : edges) ids_[next[edge.from]++] = edge.to;
  }

  template <class Visit>
  void of(OpId id, Visit visit) const {
    for (std::size_t i = begin_[id]; i < begin_[id + 1]; ++i) visit(ids_[i]);
  }

 private:
  std::vector<std::size_t> begin_;
  std::vector<OpId> ids_;
};

/// The data of a plan that all of its submissions share. Operations are large, so each is read
/// once.
struct PlanTable {
  PlanTable(const Plan& source, const Schedule& schedule, const Rates& rates)
      : plan(&source), queues(lane_count(schedule.devices)) {
    const std::size_t count = source.operations.size();
    costs.reserve(count);
    inputs.reserve(count);
    std::vector<std::optional<StreamId>> streams;
    streams.reserve(count);
    std::vector<Edge> edges;
    edges.reserve(2 * count);
    for (OpId id = 0; id < count; ++id) {
      const Operation& operation = source.operations[id];
      const std::optional<StreamId> stream = stream_of(operation);
      const std::size_t before = edges.size();
      for (const OpId input : operation.after) {
        // Only a cycle has edges from later operations.
        const bool ordered = input < id && stream && stream == streams[input];
        if (!ordered) edges.push_back({input, id});
      }
      inputs.push_back(static_cast<std::uint32_t>(edges.size() - before));
      streams.push_back(stream);
      costs.push_back(cost_of(operation, schedule, rates));
      queues.at(lane_number(operation)).push_back(id);
    }
    followers = Followers(count, edges);
  }

  const Plan* plan;
  Followers followers;
  std::vector<Cost> costs;
  std::vector<std::uint32_t>
      inputs;  ///< number of inputs that the operation's stream does not order
  std::vector<std::vector<OpId>> queues;  ///< by lane_number()
};

/// One submitted plan.
struct SimulatedRun {
  explicit SimulatedRun(const PlanTable& source)
      : table(&source),
        missing(source.inputs),
        done(source.inputs.size(), 0),
        remaining(source.inputs.size()) {}

  const PlanTable* table;
  std::vector<std::uint32_t> missing;  ///< number of unfinished inputs of each operation
  std::vector<char> done;
  std::size_t remaining;
  const Followers* next = nullptr;  ///< followers in the next run, once it is submitted

  [[nodiscard]] bool passed_gate() const {
    const OpId gate = table->plan->gate;
    return gate == kNoOp ? remaining == 0 : done[gate] != 0;
  }
};

/// A lane's position in its queue and its current operation.
struct LaneState {
  std::size_t run = 0;
  std::size_t position = 0;
  bool enqueued = false;  ///< the operation was enqueued while its predecessor ran
  double start = 0.0;
  Cost left;
};

template <class Visit>
void for_each_lane(LaneSet lanes, Visit visit) {
  for (; lanes != 0; lanes &= lanes - 1) {
    visit(static_cast<std::size_t>(std::countr_zero(lanes)));
  }
}

class Simulation {
 public:
  Simulation(const Schedule& schedule, const Rates& rates, const SimulationOptions& options)
      : options_(options),
        total_(std::size_t{options.warm_up} + options.measured),
        devices_(schedule.devices),
        steady_(schedule.steady, schedule, rates),
        sharing_(rates, schedule.devices),
        lanes_(lane_count(schedule.devices)),
        until_(lanes_.size()),
        busy_(lanes_.size(), 0.0),
        stalled_seconds_(lanes_.size(), 0.0) {
    runs_.reserve(total_);
    if (!schedule.first.operations.empty()) {
      first_.emplace(schedule.first, schedule, rates);
      if (total_ > 1) behind_first_ = join(*first_, steady_);
    }
    if (total_ > (first_ ? 2 : 1)) behind_steady_ = join(steady_, steady_);
  }

  void play() {
    if (options_.warm_up == 0) window_begin_ = 0.0;
    do {
      submit();
      start();
    } while (advance());
    if (runs_.size() < total_ || runs_.back().remaining > 0) refuse_deadlock();
  }

  Prediction take_prediction() {
    Prediction result;
    const double steps = options_.measured;
    result.step_seconds = (window_end_ - window_begin_) / steps;
    for (std::size_t number = 0; number < lanes_.size(); ++number) {
      const Lane lane = lane_at(number).lane;
      const double parts = steps * (is_per_device(lane) ? devices_ : 1);
      result.busy_seconds[index(lane)] += busy_[number] / parts;
      result.busy_seconds_by_number.push_back(busy_[number] / steps);
      result.stalled_seconds[index(lane)] += stalled_seconds_[number] / parts;
    }
    for (std::size_t run = options_.warm_up; run < total_; ++run) {
      const auto bytes = runs_[run].table->plan->bytes_by_lane();
      for (std::size_t lane = 0; lane < kLaneCount; ++lane) result.bytes[lane] += bytes[lane];
    }
    for (Bytes& bytes : result.bytes) bytes /= options_.measured;
    result.bounds = bounds();
    result.timeline = std::move(timeline_);
    return result;
  }

 private:
  static Followers join(const PlanTable& before, const PlanTable& next) {
    const auto sources = seam(*before.plan, *next.plan);
    std::vector<Edge> edges;
    for (OpId to = 0; to < sources.size(); ++to) {
      for (const OpId from : sources[to]) edges.push_back({from, to});
    }
    return {before.inputs.size(), edges};
  }

  /// Submits a run after the previous one has passed its gate if at most one other is unfinished,
  /// like the engine and the executor.
  void submit() {
    while (runs_.size() < total_) {
      const std::size_t number = runs_.size();
      if (number >= 1 && !runs_[number - 1].passed_gate()) return;
      if (number >= 2 && runs_[number - 2].remaining > 0) return;
      runs_.emplace_back(number == 0 && first_ ? *first_ : steady_);
      if (number == 0) continue;
      SimulatedRun& before = runs_[number - 1];
      before.next = number == 1 && first_ ? &behind_first_ : &behind_steady_;
      for (OpId id = 0; id < before.done.size(); ++id) {
        if (before.done[id] != 0) continue;
        before.next->of(id, [&](OpId waiting) { ++runs_[number].missing[waiting]; });
      }
    }
  }

  /// Returns whether `lane` has a next operation. Moves on to the next run at the end of one.
  bool has_next(LaneState& lane, std::size_t number) const {
    while (lane.run < runs_.size()) {
      if (lane.position < runs_[lane.run].table->queues[number].size()) return true;
      if (lane.run + 1 == runs_.size()) return false;
      ++lane.run;
      lane.position = 0;
    }
    return false;
  }

  [[nodiscard]] OpId operation_of(const LaneState& lane, std::size_t number) const {
    return runs_[lane.run].table->queues[number][lane.position];
  }

  void start() {
    stalled_ = 0;
    constexpr std::size_t kBits = std::numeric_limits<LaneSet>::digits;
    const LaneSet all = ~LaneSet{0} >> (kBits - lanes_.size());
    for_each_lane(all & ~running_, [&](std::size_t number) {
      LaneState& lane = lanes_[number];
      if (!has_next(lane, number)) return;
      const SimulatedRun& run = runs_[lane.run];
      const OpId id = operation_of(lane, number);
      if (run.missing[id] > 0) {
        stalled_ |= lane_bit(number);
        return;
      }
      running_ |= lane_bit(number);
      lane.start = now_;
      lane.left = run.table->costs[id];
      if (lane.enqueued) lane.left.lead = 0.0;
    });
  }

  /// Advances until an operation ends. Returns false if none runs.
  bool advance() {
    if (running_ == 0) return false;
    while (!step()) {
    }
    return true;
  }

  /// Advances to the next time at which an operation or its lead ends. Returns whether an operation
  /// has ended.
  bool step() {
    LaneSet working = 0;
    for_each_lane(running_, [&](std::size_t number) {
      if (lanes_[number].left.lead <= 0.0) working |= lane_bit(number);
    });
    const Speeds speeds = sharing_.speeds(working);
    double nearest = std::numeric_limits<double>::infinity();
    for_each_lane(running_, [&](std::size_t number) {
      const Cost& left = lanes_[number].left;
      until_[number] = left.lead > 0.0 ? left.lead : left.work / speeds[number];
      nearest = std::min(nearest, until_[number]);
    });
    account(nearest);
    now_ += nearest;
    bool completed = false;
    for_each_lane(running_, [&](std::size_t number) {
      LaneState& lane = lanes_[number];
      double& left = lane.left.lead > 0.0 ? lane.left.lead : lane.left.work;
      const double speed = lane.left.lead > 0.0 ? 1.0 : speeds[number];
      left = until_[number] <= nearest ? 0.0 : std::max(0.0, left - nearest * speed);
      if (lane.left.lead > 0.0 || lane.left.work > 0.0) return;
      complete(number);
      completed = true;
    });
    return completed;
  }

  void account(double seconds) {
    if (now_ < window_begin_ || now_ >= window_end_) return;
    for_each_lane(running_, [&](std::size_t number) { busy_[number] += seconds; });
    for_each_lane(stalled_, [&](std::size_t number) { stalled_seconds_[number] += seconds; });
  }

  void complete(std::size_t number) {
    LaneState& lane = lanes_[number];
    const OpId id = operation_of(lane, number);
    SimulatedRun& run = runs_[lane.run];
    const bool next_enqueued = enqueues_next(lane, number);
    run.done[id] = 1;
    --run.remaining;
    run.table->followers.of(id, [&](OpId waiting) { --run.missing[waiting]; });
    if (run.next != nullptr) {
      SimulatedRun& next = runs_[lane.run + 1];
      run.next->of(id, [&](OpId waiting) { --next.missing[waiting]; });
    }
    if (options_.timeline && lane.run >= options_.warm_up) {
      timeline_.spans.push_back({run.table->plan, id, lane.run, lane.start, now_});
    }
    mark_gates();
    running_ &= ~lane_bit(number);
    ++lane.position;
    lane.enqueued = next_enqueued;
  }

  /// Returns whether the lane's next operation has all inputs before the current one ends, so that
  /// it is already enqueued.
  [[nodiscard]] bool enqueues_next(LaneState next, std::size_t number) const {
    ++next.position;
    return is_queued(lane_at(number).lane) && has_next(next, number) &&
           runs_[next.run].missing[operation_of(next, number)] == 0;
  }

  void mark_gates() {
    while (gates_ < runs_.size() && runs_[gates_].passed_gate()) {
      ++gates_;
      if (gates_ == options_.warm_up) window_begin_ = now_;
      if (gates_ == total_) window_end_ = now_;
    }
  }

  [[noreturn]] void refuse_deadlock() const {
    for (std::size_t number = 0; number < lanes_.size(); ++number) {
      if ((stalled_ & lane_bit(number)) == 0) continue;
      const LaneState& lane = lanes_[number];
      throw Error(ErrorCategory::state,
                  fmt::format("simulator: operation {} of '{}' waits forever on lane {}",
                              operation_of(lane, number), runs_[lane.run].table->plan->name,
                              to_string(lane_at(number).lane)));
    }
    throw Error(ErrorCategory::state, "simulator: a plan never reaches its gate");
  }

  [[nodiscard]] std::vector<Prediction::Bound> bounds() const;

  SimulationOptions options_;
  std::size_t total_;
  std::uint32_t devices_;
  std::optional<PlanTable> first_;  ///< empty if the first step is like the others
  PlanTable steady_;
  Sharing sharing_;
  Followers behind_first_;
  Followers behind_steady_;

  double now_ = 0.0;
  std::vector<SimulatedRun> runs_;
  // By lane_number().
  std::vector<LaneState> lanes_;
  std::vector<double> until_;  ///< seconds until the lane's operation, or its lead, ends
  std::vector<double> busy_;
  std::vector<double> stalled_seconds_;
  LaneSet running_ = 0;
  LaneSet stalled_ = 0;
  std::size_t gates_ = 0;  ///< number of runs that have passed their gate
  double window_begin_ = std::numeric_limits<double>::infinity();
  double window_end_ = std::numeric_limits<double>::infinity();
  Timeline timeline_;
};

/// Returns the lower bound of each lane. The largest user of a shared resource stands for the total
/// time of all lanes on it, if that is longer.
std::vector<Prediction::Bound> Simulation::bounds() const {
  const PlanTable& table = total_ > 1 || !first_ ? steady_ : *first_;
  std::vector<double> alone(lanes_.size(), 0.0);
  std::vector<double> work(lanes_.size(), 0.0);
  for (OpId id = 0; id < table.costs.size(); ++id) {
    const Operation& operation = table.plan->operations[id];
    const std::size_t number = lane_number(operation);
    alone[number] += table.costs[id].seconds_in_turn(operation.lane);
    work[number] += table.costs[id].work;
  }
  // A lane that each device has counts with its busiest.
  std::array<double, kLaneCount> seconds{};
  for (std::size_t number = 0; number < lanes_.size(); ++number) {
    double& most = seconds[index(lane_at(number).lane)];
    most = std::max(most, alone[number]);
  }
  for (const auto& [lane, together] : sharing_.demands(work)) {
    seconds[index(lane)] = std::max(seconds[index(lane)], together);
  }
  std::vector<Prediction::Bound> found;
  for (std::size_t lane = 0; lane < kLaneCount; ++lane) {
    if (seconds[lane] > 0.0) found.push_back({kLanes[lane], seconds[lane]});
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const auto& a, const auto& b) { return a.seconds > b.seconds; });
  return found;
}

}  // namespace

Prediction simulate(const Schedule& schedule, const Rates& rates,
                    const SimulationOptions& options) {
  expects(options.measured > 0, "simulator: measured must be at least 1 step");
  expects(!schedule.steady.operations.empty(), "simulator: the steady step has no operations");
  check_sharing(schedule, rates);
  Simulation simulation(schedule, rates, options);
  simulation.play();
  return simulation.take_prediction();
}

double seconds_alone(const Operation& operation, const Schedule& schedule, const Rates& rates) {
  return cost_of(operation, schedule, rates).seconds();
}

double seconds_in_turn(const Operation& operation, const Schedule& schedule, const Rates& rates) {
  return cost_of(operation, schedule, rates).seconds_in_turn(operation.lane);
}

}  // namespace ballast::plan
