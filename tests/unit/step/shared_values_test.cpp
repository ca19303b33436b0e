// Values that several layers read, which no model has yet: nothing but the program knows them.

#include <map>
#include <set>

#include <gtest/gtest.h>

#include "ballast/step/labels.h"

#include "src/step/plan_types.h"
#include "tests/unit/step/random_workload.h"

namespace ballast::step {
namespace {

using model::OperandAccess;
using model::Port;

// Ports that layers in one piece do not use.
constexpr Port kShared = Port::routing;
constexpr Port kGradient = Port::router_totals;

/// A model of layers in one piece, with random placements.
TestProblem layers_in_one_piece(Dice& dice, std::uint64_t seed) {
  TestProblem problem = random_problem(4 * seed);  // without tiles of layers
  Workload& work = problem.workload;
  work.vocabulary_tiles = 1;
  work.tied = dice.toss();
  work.first_differentiated = 0;
  work.tied_accumulator_bytes = work.tied ? 4096 : 0;
  work.blocks.assign(dice.pick(7, 10), bf16_block("block", 2048, 10.0));
  for (std::size_t b = 0; b < work.blocks.size(); ++b) work.blocks[b].name += std::to_string(b);
  problem.placement.blocks.clear();
  for (std::size_t b = 0; b < work.blocks.size(); ++b) {
    problem.placement.blocks.push_back({.weights = kTiers[dice.pick(0, 2)],
                                        .optimizer = kTiers[dice.pick(0, 2)],
                                        .activations = kTiers[dice.pick(0, 2)],
                                        .keeps_intermediates = dice.toss()});
  }
  return problem;
}

/// Adds a value that layer `source` writes and `readers` (ascending) read in both passes, and its
/// gradient, which readers add to and the source reads.
void share(model::StepProgram& program, model::ClassId of, std::uint32_t source,
           const std::vector<std::uint32_t>& readers) {
  const auto add_value = [&](model::ClassId of_class) {
    program.values.push_back({.name = "shared", .of = of_class, .owner = source});
    return static_cast<model::ValueId>(program.values.size() - 1);
  };
  const model::ValueId value = add_value(of);
  const model::ValueId gradient = add_value(of + 1);
  for (model::Pass& pass : program.passes) {
    const auto add = [&](Port port, model::ValueId id, OperandAccess access) {
      pass.operands.push_back(
          {.port = port, .kind = model::OperandKind::value, .number = id, .access = access});
    };
    const bool reads = std::find(readers.begin(), readers.end(), pass.block) != readers.end();
    if (pass.kernel == model::Kernel::layer) {
      if (pass.block == source) add(kShared, value, OperandAccess::writes);
      if (reads) add(kShared, value, OperandAccess::reads);
    }
    if (pass.kernel == model::Kernel::layer_backward) {
      if (reads) add(kShared, value, OperandAccess::reads);
      if (reads) {
        add(kGradient, gradient,
            pass.block == readers.back() ? OperandAccess::writes : OperandAccess::updates);
      }
      if (pass.block == source) add(kGradient, gradient, OperandAccess::reads);
    }
  }
}

TEST(SharedValues, ReachTheirReadersInEveryPlacement) {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    Dice dice(seed);
    TestProblem problem = layers_in_one_piece(dice, seed);
    Workload& work = problem.workload;
    model::StepProgram program = model::write_program(shape_of(work));
    const auto of = static_cast<model::ClassId>(program.classes.size());
    program.classes.push_back({.name = "shared keys and values", .bytes = 128});
    program.classes.push_back({.name = "gradient of shared keys and values", .bytes = 128});
    // Layers 3 and later read what layer 1 or 2 has written.
    std::map<std::uint32_t, std::uint32_t> source_of;
    for (const std::uint32_t source : {1U, 2U}) {
      std::vector<std::uint32_t> readers;
      for (std::uint32_t b = 3; b + 1 < work.blocks.size(); ++b) {
        if (b % 2 == source % 2) readers.push_back(b);
      }
      for (const std::uint32_t reader : readers) source_of[reader] = source;
      share(program, of, source, readers);
    }
    const Schedule schedule =
        build(with_program(work, std::move(program)), problem.placement, problem.options);

    // By buffer and micro-batch: the block whose value it holds, and how many have added to it.
    std::map<BufferId, std::pair<std::uint32_t, std::uint32_t>> held;
    std::map<BufferId, std::uint32_t> additions;
    std::set<BufferId> shared;
    for (const Operation& operation : schedule.steady.operations) {
      const std::uint32_t b = operation.block;
      const BufferId buffer = operation.buffer(role_of(kShared));
      const BufferId gradient = operation.buffer(role_of(kGradient));
      if (operation.action != Action::compute) continue;
      if (buffer != kNoBuffer) {
        shared.insert(buffer);
        if (operation.use(role_of(kShared)).writes) held[buffer] = {b, operation.micro};
        const std::uint32_t source = b < 3 ? b : source_of.at(b);
        ASSERT_EQ(held[buffer], std::pair(source, operation.micro)) << "seed " << seed;
      }
      if (gradient != kNoBuffer) {
        const std::uint32_t source = b < 3 ? b : source_of.at(b);
        std::uint32_t expected = 0;
        for (const auto& [reader, its] : source_of) expected += its == source && reader > b ? 1 : 0;
        ASSERT_EQ(expected == 0 ? 0 : additions[gradient], expected) << "seed " << seed;
        additions[gradient] = expected + 1;
      }
    }
    const bool together = problem.options.order == Order::layer_major;
    ASSERT_EQ(shared.size(), 2 * (together ? work.micro_batches : 1)) << "seed " << seed;
  }
}

}  // namespace
}  // namespace ballast::step
