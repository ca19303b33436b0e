#include <map>
#include <vector>

#include <fmt/format.h>

#include "ballast/schedule/plan.h"

namespace ballast::schedule {
namespace {

/// For every operation of two consecutive runs, the set of those that are finished before it.
class Ancestors {
 public:
  explicit Ancestors(const Plan& plan)
      : count_(plan.operations.size()), sets_(2 * count_, std::vector<bool>(2 * count_)) {
    std::array<std::size_t, kLaneCount> last{};
    last.fill(kNone);
    for (std::size_t node = 0; node < 2 * count_; ++node) {
      const std::size_t run = node / count_;
      const Operation& operation = plan.operations[node % count_];
      for (const OpId id : operation.after) include(node, run * count_ + id);
      if (run == 1) {
        for (const OpId id : operation.after_previous) include(node, id);
      }
      std::size_t& in_lane = last[static_cast<std::size_t>(operation.lane)];
      if (in_lane != kNone) include(node, in_lane);
      in_lane = node;
    }
  }

  [[nodiscard]] bool ordered(std::size_t first, std::size_t second) const {
    return sets_[second][first];
  }

 private:
  static constexpr std::size_t kNone = ~std::size_t{0};

  void include(std::size_t node, std::size_t before) {
    if (before >= node) return;  // reported as an edge that does not point backwards
    for (std::size_t i = 0; i < 2 * count_; ++i) {
      if (sets_[before][i]) sets_[node][i] = true;
    }
    sets_[node][before] = true;
  }

  std::size_t count_;
  std::vector<std::vector<bool>> sets_;
};

struct Access {
  std::size_t node;
  bool writes;
};

}  // namespace

std::vector<std::string> find_hazards(const Schedule& schedule, const Plan& plan) {
  std::vector<std::string> breaches;
  const std::size_t count = plan.operations.size();
  std::map<BufferId, std::vector<Access>> accesses;
  for (std::size_t node = 0; node < 2 * count; ++node) {
    const Operation& operation = plan.operations[node % count];
    for (const Use& use : operation.uses) accesses[use.buffer].push_back({node, use.writes});
    for (const OpId id : operation.after) {
      if (id >= node % count && node < count) {
        breaches.push_back(fmt::format("operation {} waits for the later operation {}", node, id));
      }
    }
  }
  const Ancestors ancestors(plan);
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
