#include "tests/support/hazards.h"

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include <fmt/format.h>

namespace ballast::plan {
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

/// Operation `id` of the plan with submission number `submission` (from 0).
struct Node {
  std::size_t submission;
  OpId id;
};

/// All operations of consecutively submitted plans, numbered in order, each with the set of
/// operations that finish before it starts.
class Before {
 public:
  explicit Before(const std::vector<const Plan*>& plans) {
    std::size_t count = 0;
    for (const Plan* plan : plans) count += plan->operations.size();
    before_.assign(count, Set(count));
    nodes_.reserve(count);
    for (std::size_t number = 0; number < plans.size(); ++number) {
      starts_.push_back(nodes_.size());
      add(plans, number);
    }
  }

  [[nodiscard]] bool ordered(std::size_t first, std::size_t second) const {
    return before_[second].has(first);
  }
  [[nodiscard]] const Node& node(std::size_t number) const { return nodes_[number]; }

 private:
  void add(const std::vector<const Plan*>& plans, std::size_t number) {
    const auto& operations = plans[number]->operations;
    std::vector<std::vector<OpId>> joins(operations.size());
    if (number > 0) joins = seam(*plans[number - 1], *plans[number]);
    // A plan is submitted only after the second-last one has finished.
    Set finished(before_.size());
    const std::size_t finished_count = number > 1 ? starts_[number - 1] : 0;
    for (std::size_t node = 0; node < finished_count; ++node) finished.add(node);
    for (OpId id = 0; id < operations.size(); ++id) {
      const std::size_t node = nodes_.size();
      nodes_.push_back({number, id});
      before_[node].add(finished);
      for (const OpId earlier : operations[id].after) follow(node, starts_[number] + earlier);
      for (const OpId earlier : joins[id]) follow(node, starts_[number - 1] + earlier);
      const std::optional<StreamId> stream = stream_of(operations[id]);
      if (!stream) continue;
      const auto [last, first_there] = last_.try_emplace({stream->lane, stream->device}, node);
      if (!first_there) follow(node, std::exchange(last->second, node));
    }
  }

  void follow(std::size_t node, std::size_t earlier) {
    if (earlier >= node) return;  // find_hazards() reports such an edge
    before_[node].add(before_[earlier]);
    before_[node].add(earlier);
  }

  std::vector<Set> before_;
  std::vector<Node> nodes_;
  std::vector<std::size_t> starts_;                            ///< first node of each submission
  std::map<std::pair<Lane, std::uint8_t>, std::size_t> last_;  ///< by stream
};

struct Access {
  std::size_t node;
  bool writes;
};

std::string name(const std::vector<const Plan*>& plans, const Node& node) {
  const Operation& operation = plans[node.submission]->operations[node.id];
  const bool moves = operation.payload != Payload::none;
  return fmt::format("operation {} of plan {} ({}{}{}, block {}, micro-batch {})", node.id,
                     node.submission, to_string(operation.action), moves ? " " : "",
                     to_string(operation.payload), operation.block, operation.micro);
}

}  // namespace

std::vector<std::string> find_hazards(const Schedule& schedule,
                                      const std::vector<const Plan*>& plans) {
  std::vector<std::string> breaches;
  std::map<BufferId, std::vector<Access>> accesses;
  std::size_t node = 0;
  for (std::size_t number = 0; number < plans.size(); ++number) {
    const auto& operations = plans[number]->operations;
    for (OpId id = 0; id < operations.size(); ++id, ++node) {
      for (const Use& use : operations[id].uses) {
        accesses[use.buffer].push_back({node, use.writes});
      }
      for (const OpId before : operations[id].after) {
        if (before < id) continue;
        breaches.push_back(fmt::format("{} waits for {}, which is not before it in the plan",
                                       name(plans, {number, id}), name(plans, {number, before})));
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
            fmt::format("{} and {} use '{}' without order", name(plans, order.node(list[i].node)),
                        name(plans, order.node(list[j].node)), schedule.buffers[buffer].name));
      }
    }
  }
  return breaches;
}

}  // namespace ballast::plan
