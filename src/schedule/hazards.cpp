#include <cstdint>
#include <map>
#include <vector>

#include <fmt/format.h>

#include "ballast/schedule/plan.h"

namespace ballast::schedule {
namespace {

/// A set of operations, by number.
class Set {
 public:
  explicit Set(std::size_t count) : words_((count + 63) / 64) {}

  void add(std::size_t member) { words_[member / 64] |= std::uint64_t{1} << (member % 64); }
  void add(const Set& other) {
    for (std::size_t i = 0; i < words_.size(); ++i) words_[i] |= other.words_[i];
  }
  [[nodiscard]] bool has(std::size_t member) const {
    return (words_[member / 64] >> (member % 64) & 1U) != 0;
  }

 private:
  std::vector<std::uint64_t> words_;
};

/// Operation `id` of `run` (from 0).
struct Place {
  std::size_t run;
  OpId id;
};

/// All operations of consecutive runs, numbered in their order, and for each of them the set of
/// those that are finished before it starts.
class Before {
 public:
  explicit Before(const std::vector<const Plan*>& plans) {
    std::size_t count = 0;
    for (const Plan* plan : plans) count += plan->operations.size();
    before_.assign(count, Set(count));
    places_.reserve(count);
    last_.fill(kNone);
    for (std::size_t run = 0; run < plans.size(); ++run) {
      starts_.push_back(places_.size());
      add_run(plans, run);
    }
  }

  [[nodiscard]] bool ordered(std::size_t first, std::size_t second) const {
    return before_[second].has(first);
  }
  [[nodiscard]] const Place& place(std::size_t node) const { return places_[node]; }

 private:
  static constexpr std::size_t kNone = ~std::size_t{0};

  void add_run(const std::vector<const Plan*>& plans, std::size_t run) {
    const auto& operations = plans[run]->operations;
    std::vector<std::vector<OpId>> joins(operations.size());
    if (run > 0) joins = seam(*plans[run - 1], *plans[run]);
    // A run is not submitted before the last but one is finished.
    Set finished(before_.size());
    const std::size_t finished_count = run > 1 ? starts_[run - 1] : 0;
    for (std::size_t node = 0; node < finished_count; ++node) finished.add(node);
    for (OpId id = 0; id < operations.size(); ++id) {
      const std::size_t node = places_.size();
      places_.push_back({run, id});
      before_[node].add(finished);
      for (const OpId earlier : operations[id].after) follow(node, starts_[run] + earlier);
      for (const OpId earlier : joins[id]) follow(node, starts_[run - 1] + earlier);
      std::size_t& in_lane = last_[static_cast<std::size_t>(operations[id].lane)];
      if (in_lane != kNone) follow(node, in_lane);
      in_lane = node;
    }
  }

  void follow(std::size_t node, std::size_t earlier) {
    if (earlier >= node) return;  // reported as an edge that does not point backwards
    before_[node].add(before_[earlier]);
    before_[node].add(earlier);
  }

  std::vector<Set> before_;
  std::vector<Place> places_;
  std::vector<std::size_t> starts_;  ///< of the runs
  std::array<std::size_t, kLaneCount> last_{};
};

struct Access {
  std::size_t node;
  bool writes;
};

std::string name(const std::vector<const Plan*>& plans, const Place& place) {
  const Operation& operation = plans[place.run]->operations[place.id];
  return fmt::format("operation {} of run {} ({}, block {}, micro-batch {})", place.id, place.run,
                     to_string(operation.action), operation.block, operation.micro);
}

}  // namespace

std::vector<std::string> find_hazards(const Schedule& schedule,
                                      const std::vector<const Plan*>& plans) {
  std::vector<std::string> breaches;
  std::map<BufferId, std::vector<Access>> accesses;
  std::size_t node = 0;
  for (std::size_t run = 0; run < plans.size(); ++run) {
    const auto& operations = plans[run]->operations;
    for (OpId id = 0; id < operations.size(); ++id, ++node) {
      for (const Use& use : operations[id].uses) {
        accesses[use.buffer].push_back({node, use.writes});
      }
      for (const OpId before : operations[id].after) {
        if (before < id) continue;
        breaches.push_back(fmt::format("{} waits for {}, which is not before it in the plan",
                                       name(plans, {run, id}), name(plans, {run, before})));
      }
    }
  }
  const Before order(plans);
  for (const auto& [buffer, list] : accesses) {
    for (std::size_t j = 0; j < list.size(); ++j) {
      for (std::size_t i = 0; i < j; ++i) {
        if (!list[i].writes && !list[j].writes) continue;
        if (list[i].node == list[j].node || order.ordered(list[i].node, list[j].node)) continue;
        breaches.push_back(
            fmt::format("{} and {} use '{}' without order", name(plans, order.place(list[i].node)),
                        name(plans, order.place(list[j].node)), schedule.buffers[buffer].name));
      }
    }
  }
  return breaches;
}

}  // namespace ballast::schedule
