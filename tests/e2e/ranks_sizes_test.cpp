#include <array>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "ballast/comm/agreement.h"
#include "ballast/engine/engine.h"
#include "ballast/setup/setup.h"
#include "ballast/step/problem.h"

#include "tests/support/device_kind.h"
#include "tests/support/function_weights.h"
#include "tests/support/joined_ranks.h"
#include "tests/support/tags.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"
#include "tests/support/tiny_training.h"
#include "tests/support/zero_memory.h"

// Run by all ranks of mpirun: the sizes that a rank stores and exchanges are those of the ZeRO
// paper (arXiv 1910.02054), sections 5 and 7.

namespace ballast::engine::ranks_sizes_test {
namespace {

using plan::Lane;

const std::string kModel = R"("family": "llama", "vocab_size": 512, "hidden_size": 192,
                              "num_layers": 6, "num_heads": 3)";

config::Config stage_config(int stage, const test::TempDir& directory) {
  std::vector<std::string> overrides = {fmt::format("zero_optimization.stage={}", stage),
                                        "ballast.device_bytes=256MiB", "ballast.host_bytes=256MiB"};
  // Without a GPU its kernels run thread by thread on the host. Sizes per
  // parameter depend neither on the batch nor on the depth.
  if (test::device_kind() == "cuda") {
    overrides.insert(overrides.end(),
                     {"model.num_layers=3", "data.sequence_length=4",
                      "train_micro_batch_size_per_gpu=1", "gradient_accumulation_steps=1"});
  }
  return test::tiny_config(kModel, true, directory.path(), overrides);
}

/// Model states that this rank has allocated, all of them on the device.
step::StateBytes stored(const Engine& engine) {
  step::StateBytes bytes = {0.0, 0.0, 0.0};
  for (const memory::LedgerLine& line : engine.blueprint().ledger.lines()) {
    const auto size = static_cast<double>(line.bytes);
    if (line.kind == to_string(plan::Kind::weights)) bytes.weights += size;
    if (line.kind == to_string(plan::Kind::gradients)) bytes.gradients += size;
    if (line.kind == to_string(plan::Kind::states)) bytes.optimizer += size;
  }
  const auto device = static_cast<std::size_t>(Tier::device);
  EXPECT_EQ(engine.totals().allocated[device], engine.blueprint().ledger.total(Tier::device));
  return bytes;
}

Bytes exchanged_so_far(const Engine& engine) {
  const plan::LaneTotals totals = engine.totals().lanes;
  return totals.bytes[static_cast<std::size_t>(Lane::gather)] +
         totals.bytes[static_cast<std::size_t>(Lane::reduce)];
}

/// Bytes exchanged between ranks in a training step that follows another one.
Bytes exchanged_in_a_step(Engine& engine) {
  const auto step = [&](std::uint64_t number) {
    const test::Batch batch =
        test::part_of(test::chained_ids(engine.blueprint().problem.tokens_per_step(), number),
                      &test::joined_ranks());
    engine.train_step({batch.tokens, batch.targets}, 1e-3);
  };
  step(1);
  engine.finish();
  const Bytes before = exchanged_so_far(engine);
  step(2);
  engine.finish();
  return exchanged_so_far(engine) - before;
}

/// Bytes of weights that a rank receives when every block is gathered once, padding included.
Bytes received_once(const Blueprint& blueprint, std::size_t first, std::size_t last) {
  const step::RankSizes sizes(blueprint.problem);
  Bytes sum = 0;
  for (std::size_t b = first; b <= last; ++b) {
    sum += sizes.received_from_all(sizes.padded_weights(static_cast<std::uint32_t>(b)));
  }
  return sum;
}

void expect_stored(const step::StateBytes& found, const Blueprint& blueprint, int stage) {
  const std::uint32_t world = blueprint.mesh.ranks();
  const auto elements = [&] {
    double sum = 0.0;
    for (const auto& block : blueprint.model.blocks) sum += static_cast<double>(block.elements);
    return sum;
  }();
  const step::StateBytes paper = step::zero_memory(elements, world, stage, step::kOwnStateBytes);
  // Shards are whole pages, and the arrays of a state buffer have gaps between them
  // (cpu_adam::kArraySkew).
  const double parts = static_cast<double>(blueprint.model.blocks.size()) * (world + 4) * kPage;
  const double apart = static_cast<double>(blueprint.model.blocks.size()) * 3 * 32 * kPage;
  const auto expect_near = [&](double bytes, double exact, double slack) {
    EXPECT_GE(bytes, exact) << "stage " << stage;
    EXPECT_LE(bytes, exact + slack) << "stage " << stage;
  };
  expect_near(found.weights, paper.weights, parts);
  expect_near(found.gradients, paper.gradients, parts);
  expect_near(found.optimizer, paper.optimizer, parts + apart);
}

TAG_TESTS("2_ranks_emulated,3_ranks_emulated", "RanksSizes.AreThoseOfTheZeroPaper");
TEST(RanksSizes, AreThoseOfTheZeroPaper) {
  comm::Ranks& ranks = test::joined_ranks();
  for (int stage = 0; stage <= 3; ++stage) {
    const test::TempDir directory;
    Engine engine = setup::make_engine(stage_config(stage, directory), nullptr, &ranks);
    engine.start();
    const Blueprint& blueprint = engine.blueprint();
    const step::StateBytes bytes = stored(engine);
    expect_stored(bytes, blueprint, stage);
    const Bytes exchanged = exchanged_in_a_step(engine);
    const std::size_t head = blueprint.model.blocks.size() - 1;
    const Bytes once = received_once(blueprint, 0, head);
    // Stage 3 gathers for the forward and for the backward pass. The backward pass of the embedding
    // needs no weights, and the last two blocks are still on the device.
    const Bytes backward = stage == 3 ? received_once(blueprint, 1, head - 2) : 0;
    EXPECT_EQ(exchanged, 2 * once + backward) << "stage " << stage;
    if (ranks.rank() != 0) continue;
    fmt::print(
        "{} ranks, stage {}: weights {:.2f}, gradients {:.2f}, states {:.2f} MB on each; "
        "exchanged {:.2f} MB per step = {:.2f} of all weights\n",
        ranks.world(), stage, bytes.weights / 1e6, bytes.gradients / 1e6, bytes.optimizer / 1e6,
        static_cast<double>(exchanged) / 1e6,
        once == 0 ? 0.0 : static_cast<double>(exchanged) / static_cast<double>(once));
  }
}

TAG_TESTS("2_ranks_emulated,3_ranks_emulated",
          "RanksWeights.OneOtherValueIsNamedWhereRanksKeepTheWhole");
/// One value of the last rank differs, far from where a sample of a file would find it.
TEST(RanksWeights, OneOtherValueIsNamedWhereRanksKeepTheWhole) {
  comm::Ranks& ranks = test::joined_ranks();
  const std::uint32_t odd = ranks.world() - 1;
  for (int stage = 0; stage <= 3; ++stage) {
    const test::TempDir directory;
    Engine engine = setup::make_engine(stage_config(stage, directory), nullptr, &ranks);
    const model::BlockSpec& block = engine.blueprint().model.blocks[1];
    const std::string changed = block.tensors.back().name;
    std::string found;
    try {
      test::start_from(engine,
                       {[&](const model::TensorSpec& tensor, Elems first, std::span<float> out) {
                         for (float& value : out) value = 0.5F;
                         const bool here = first == 0 && ranks.rank() == odd && odd > 0;
                         if (here && tensor.name == changed) out.front() = 0.75F;
                       }});
    } catch (const comm::JointError& error) {
      found = error.what();
    }
    if (stage == 3 || odd == 0) {
      EXPECT_EQ(found, "") << "stage " << stage;
      continue;
    }
    EXPECT_NE(found.find(fmt::format("rank {} on {}: the weights of {} differ from those of rank 0",
                                     odd, comm::host_name(), block.name)),
              std::string::npos)
        << "stage " << stage << ": " << found;
  }
}

}  // namespace
}  // namespace ballast::engine::ranks_sizes_test
