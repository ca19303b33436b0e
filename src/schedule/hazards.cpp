#include <map>
#include <vector>

#include <fmt/format.h>

#include "ballast/schedule/plan.h"

namespace ballast::schedule {
namespace {

/// For every operation of consecutive runs, the set of those that are finished before it.
class Ancestors {
 public:
  explicit Ancestors(const std::vector<const Plan*>& plans) {
    std::size_t count = 0;
    for (const Plan* plan : plans) count += plan->operations.size();
    sets_.assign(count, std::vector<bool>(count));
    std::array<std::size_t, kLaneCount> last{};
    last.fill(kNone);
    std::size_t start = 0;
    std::size_t start_before = 0;
    for (std::size_t run = 0; run < plans.size(); ++run) {
      const auto& operations = plans[run]->operations;
      std::vector<std::vector<OpId>> joins(operations.size());
      if (run > 0) joins = seam(*plans[run - 1], *plans[run]);
      for (OpId id = 0; id < operations.size(); ++id) {
        const std::size_t node = start + id;
        for (const OpId before : operations[id].after) include(node, start + before);
        for (const OpId before : joins[id]) include(node, start_before + before);
        std::size_t& in_lane = last[static_cast<std::size_t>(operations[id].lane)];
        if (in_lane != kNone) include(node, in_lane);
        in_lane = node;
        // A third run is not submitted before the first is finished.
        if (run > 1) {
          for (std::size_t i = 0; i < start_before; ++i) sets_[node][i] = true;
        }
      }
      start_before = start;
      start += operations.size();
    }
  }

  [[nodiscard]] bool ordered(std::size_t first, std::size_t second) const {
    return sets_[second][first];
  }

 private:
  static constexpr std::size_t kNone = ~std::size_t{0};

  void include(std::size_t node, std::size_t before) {
    if (before >= node) return;  // reported as an edge that does not point backwards
    for (std::size_t i = 0; i < sets_.size(); ++i) {
      if (sets_[before][i]) sets_[node][i] = true;
    }
    sets_[node][before] = true;
  }

  std::vector<std::vector<bool>> sets_;
};

struct Access {
  std::size_t node;
  bool writes;
};

}  // namespace

std::vector<std::string> find_hazards(const Schedule& schedule,
                                      const std::vector<const Plan*>& plans) {
  std::vector<std::string> breaches;
  std::map<BufferId, std::vector<Access>> accesses;
  std::size_t node = 0;
  for (const Plan* plan : plans) {
    for (OpId id = 0; id < plan->operations.size(); ++id, ++node) {
      const Operation& operation = plan->operations[id];
      for (const Use& use : operation.uses) accesses[use.buffer].push_back({node, use.writes});
      for (const OpId before : operation.after) {
        if (before < id) continue;
        breaches.push_back(fmt::format("{}: operation {} waits for the later operation {}",
                                       plan->name, id, before));
      }
    }
  }
  const Ancestors ancestors(plans);
  for (const auto& [buffer, list] : accesses) {
    for (std::size_t j = 0; j < list.size(); ++j) {
      for (std::size_t i = 0; i < j; ++i) {
        if (!list[i].writes && !list[j].writes) continue;
        if (list[i].node == list[j].node || ancestors.ordered(list[i].node, list[j].node)) continue;
        breaches.push_back(fmt::format("operations {} and {} use '{}' without order", list[i].node,
                                       list[j].node, schedule.buffers[buffer].name));
      }
    }
  }
  return breaches;
}

}  // namespace ballast::schedule
