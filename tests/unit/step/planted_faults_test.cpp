// Plants faults into plans, one at a time. The interpreter or the check of edges must find each.

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/step/labels.h"
#include "ballast/step/plans.h"
#include "ballast/step/problem.h"

#include "tests/support/random_problem.h"
#include "tests/unit/step/interpreter.h"

namespace ballast::step::planted_faults_test {
namespace {

/// A schedule and a training that uses all of its plans.
struct Case {
  explicit Case(std::uint64_t seed)
      : number(seed), placed(random_problem(seed, {.ranks = seed % 2 == 1, .devices = true})) {
    const auto& [problem, placement, options] = placed;
    schedule = build(problem, placement, options);
    fill = build_fill(problem, placement, options);
    read = build_read(problem, placement, options, 0, blocks());
  }

  [[nodiscard]] std::uint32_t blocks() const {
    return static_cast<std::uint32_t>(placed.problem.blocks.size());
  }
  [[nodiscard]] std::vector<const Plan*> runs(const Schedule& of) const {
    const bool gated = of.steady.leaves_updates;
    std::vector<const Plan*> all = {&fill, gated ? &of.first : &of.steady, &of.steady, &of.steady};
    if (!of.rollback.operations.empty()) {
      all.insert(all.end(), {&of.rollback, &of.first, &of.steady});
    }
    if (gated) all.push_back(&of.flush);
    all.insert(all.end(), {&of.evaluation, &read});
    return all;
  }
  [[nodiscard]] bool finds_faults(const Schedule& of) const {
    const auto& [problem, placement, options] = placed;
    return !find_faults(problem, placement, options, of, runs(of), number).empty();
  }

  std::uint64_t number;
  BuildArguments placed;
  Schedule schedule;
  Plan fill;
  Plan read;
};

/// Changes an operation of a plan. Returns false if the fault does not exist there, or is harmless.
using Plant = std::function<bool(const Case&, Plan&, OpId)>;

bool is_update(const Operation& op) {
  return op.action == Action::update || op.action == Action::update_on_device;
}
bool computes(const Operation& op) {
  return op.action == Action::compute || op.action == Action::pack || op.action == Action::clear ||
         op.action == Action::reduce || is_update(op);
}
bool names_its_buffer(const Use& use) {
  return use.role != Role::scratch && use.role != role_of(model::Port::workspace);
}

/// Data of a partly trained block may come in two pieces, in any order, or without being used.
bool is_in_pieces(const Case& c, const Operation& op) {
  const BlockSizes& block = c.placed.problem.blocks[op.block];
  return op.payload == Payload::weights && block.gradient_bytes < block.weight_bytes;
}

bool drop(const Case& c, Plan& plan, OpId id) {
  const Operation& op = plan.operations[id];
  const bool passes = std::any_of(plan.operations.begin(), plan.operations.begin() + id,
                                  [&](const Operation& before) {
                                    return op.action == Action::compute &&
                                           runs(before, kernel_of(op)) && before.block == op.block;
                                  });
  // Recomputed values may still be there, and only the padding of undone weights is left.
  const bool harmless = passes ||
                        (op.action == Action::offload && op.speculation == Speculation::redoes) ||
                        is_in_pieces(c, op);
  if (harmless) return false;
  plan.operations.erase(plan.operations.begin() + id);
  return true;
}

bool repeat(const Case&, Plan& plan, OpId id) {
  const Operation op = plan.operations[id];
  if (op.action != Action::compute && !is_update(op)) return false;
  plan.operations.insert(plan.operations.begin() + id, op);
  return true;
}

bool swap_with_next(const Case&, Plan& plan, OpId id) {
  if (id + 1 == plan.operations.size()) return false;
  Operation& a = plan.operations[id];
  Operation& b = plan.operations[id + 1];
  const auto needs = [&](const Use& one) {
    return std::any_of(b.uses.begin(), b.uses.end(), [&](const Use& other) {
      return one.buffer == other.buffer && one.writes && names_its_buffer(one);
    });
  };
  if (!computes(a) || !computes(b) || !std::any_of(a.uses.begin(), a.uses.end(), needs)) {
    return false;
  }
  std::swap(a, b);
  return true;
}

/// Returns whether the operation selects rows that its buffer may have from the forward pass.
bool selects_again(const Plan& plan, OpId id) {
  const Operation& op = plan.operations[id];
  const auto same = [&](const Operation& other) {
    return other.action == op.action && other.block == op.block && other.micro == op.micro &&
           other.buffer(Role::target) == op.buffer(Role::target);
  };
  return op.action == Action::select &&
         std::any_of(plan.operations.begin(), plan.operations.begin() + id, same);
}

/// Uses another buffer of the tier, for the first use or the last.
bool use_another_buffer(const Case& c, Plan& plan, OpId id, bool first) {
  const std::vector<Buffer>& buffers = c.schedule.buffers;
  Operation& op = plan.operations[id];
  Use& use = first ? op.uses.front() : op.uses.back();
  if (!names_its_buffer(use) || is_in_pieces(c, op) || selects_again(plan, id)) return false;
  for (BufferId other = 0; other < buffers.size(); ++other) {
    if (other == use.buffer || buffers[other].tier != buffers[use.buffer].tier) continue;
    return use.buffer = other, true;
  }
  return false;
}

template <class Applies, class Change>
Plant change(Applies applies, Change change) {
  return [applies, change](const Case& c, Plan& plan, OpId id) {
    Operation& op = plan.operations[id];
    if (!applies(c, op)) return false;
    change(c, op);
    return true;
  };
}

std::map<std::string, Plant> faults() {
  const auto any = [](const Case&, const Operation&) { return true; };
  const auto updates = [](const Case&, const Operation& op) { return is_update(op); };
  const auto passes = [](const Case&, const Operation& op) { return op.action == Action::compute; };
  std::map<std::string, Plant> all = {{"an operation is left out", drop},
                                      {"a pass or an update is repeated", repeat},
                                      {"an operation precedes what it needs", swap_with_next}};
  all["another buffer is first"] = [](const Case& c, Plan& plan, OpId id) {
    return use_another_buffer(c, plan, id, true);
  };
  all["another buffer is last"] = [](const Case& c, Plan& plan, OpId id) {
    return use_another_buffer(c, plan, id, false);
  };
  all["an argument is missing"] =
      change(any, [](const Case&, Operation& op) { op.uses.pop_back(); });
  all["a write is a read"] = change(any, [](const Case&, Operation& op) {
    for (Use& use : op.uses) use.writes = false;
  });
  all["all ranks' part instead of the shard"] = change(
      [](const Case& c, const Operation& op) {
        // The shard may be the first one of the weights that the rank keeps.
        const Problem& problem = c.placed.problem;
        if (problem.sharers == 1) return false;
        const auto rank = static_cast<std::uint32_t>(1 + c.number % (problem.sharers - 1));
        return is_update(op) && op.uses.front().shard &&
               RankSizes(problem).shard_at_home(op.block, rank) > 0;
      },
      [](const Case&, Operation& op) { op.uses.front().shard = false; });
  all["another micro-batch"] = change(
      [](const Case& c, const Operation& op) {
        return c.placed.problem.micro_batches > 1 && op.action == Action::compute;
      },
      [](const Case&, Operation& op) { op.micro = op.micro == 0 ? 1 : 0; });
  all["another block"] = change(
      [](const Case&, const Operation& op) {
        return op.action != Action::gate && op.payload != Payload::value;
      },
      [](const Case& c, Operation& op) { op.block = (op.block + 1) % c.blocks(); });
  all["another pass"] = change(passes, [](const Case&, Operation& op) { op.label ^= 1U; });
  all["the cost of a pass that recomputes"] =
      change(passes, [](const Case&, Operation& op) { op.flops += 1.0; });
  all["half of a gradient"] = change(
      [](const Case&, const Operation& op) {
        return op.payload == Payload::gradient && op.action == Action::offload;
      },
      [](const Case&, Operation& op) { op.bytes /= 2; });
  all["the gradient of another step"] =
      change(updates, [](const Case&, Operation& op) { op.lag = 1 - op.lag; });
  all["another kind of update"] = change(updates, [](const Case&, Operation& op) {
    op.speculation =
        op.speculation == Speculation::none ? Speculation::speculates : Speculation::none;
  });
  all["another sub-group"] =
      change([](const Case&,
                const Operation& op) { return is_update(op) || op.payload == Payload::states; },
             [](const Case&, Operation& op) { ++op.sub_group; });
  all["another device"] = change(
      [](const Case&, const Operation& op) { return plan::is_per_device(op.lane); },
      [](const Case& c, Operation& op) {
        op.device = static_cast<std::uint8_t>((op.device + 1) % std::max(2U, c.schedule.devices));
      });
  all["other ranks"] = change(
      [](const Case&, const Operation& op) {
        return op.action == Action::gather && op.payload == Payload::weights;
      },
      [](const Case&, Operation& op) {
        op.group = op.group == RankGroup::all ? RankGroup::weight_copy : RankGroup::all;
      });
  return all;
}

TEST(PlantedFaults, AMissingFillOrFlushIsFound) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const Case c(seed);
    const auto& [problem, placement, options] = c.placed;
    for (const Plan* missing : {&c.fill, &c.schedule.flush}) {
      auto runs = c.runs(c.schedule);
      if (std::erase(runs, missing) == 0) continue;
      EXPECT_NE(find_faults(problem, placement, options, c.schedule, runs, seed),
                std::vector<std::string>{})
          << missing->name << ", seed " << seed;
    }
  }
}

TEST(PlantedFaults, AreFound) {
  std::map<std::string, int> planted;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    const Case c(seed);
    Dice dice(seed);
    ASSERT_FALSE(c.finds_faults(c.schedule)) << seed;
    for (const auto& [name, found] : faults()) {
      const auto& plant = found;  // lambdas of clang 14 do not capture structured bindings
      for (Plan Schedule::*which : {&Schedule::steady, &Schedule::rollback, &Schedule::flush}) {
        Schedule schedule = c.schedule;
        std::vector<Operation>& operations = (schedule.*which).operations;
        if (operations.empty()) continue;
        // The needs of experts depend on a draw.
        const auto plants = [&](OpId id) {
          return !c.placed.problem.program().blocks[operations[id].block].rows &&
                 plant(c, schedule.*which, id);
        };
        const auto n = static_cast<OpId>(operations.size());
        const auto from = static_cast<OpId>(dice.pick(0, n - 1));
        OpId tried = 0;
        while (tried < n && !plants((from + tried) % n)) ++tried;
        if (tried == n) continue;
        const Operation& at = (c.schedule.*which).operations[(from + tried) % n];
        EXPECT_TRUE(c.finds_faults(schedule))
            << name << ": operation " << (from + tried) % n << " ("
            << OperationNames(c.placed.problem)(at) << ") of " << (schedule.*which).name
            << ", seed " << seed;
        ++planted[name];
      }
    }
  }
  for (const auto& [name, plant] : faults()) EXPECT_GE(planted[name], 10) << name;
}

}  // namespace
}  // namespace ballast::step::planted_faults_test
