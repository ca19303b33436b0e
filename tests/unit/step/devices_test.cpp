// Several devices in one plan: the blocks of each device, and the time that a step takes.

#include "src/step/devices.h"

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/plan/simulator.h"
#include "ballast/step/labels.h"

#include "src/model/description/program_draft.h"
#include "tests/support/expect_error.h"
#include "tests/support/random_problem.h"
#include "tests/unit/plan/unit_rates.h"

namespace ballast::step::devices_test {
namespace {

using Devices = std::vector<std::uint8_t>;
using Role = model::BlockRole;

/// A model without sizes.
model::ProgramShape shape_of(const std::vector<std::pair<Role, std::uint32_t>>& blocks,
                             bool tied = false) {
  model::ProgramShape shape = {.tied = tied, .activation = 64, .batch = 64, .losses = 8};
  for (const auto& [role, layer] : blocks) {
    shape.blocks.push_back({.name = "block", .role = role, .gradient = 64, .layer = layer});
  }
  shape.tied_gradient = tied ? 64 : 0;
  return shape;
}

Devices dealt(const model::ProgramShape& shape, std::uint32_t devices) {
  return deal(model::write_program(shape), devices);
}

TEST(Deal, LayersGoRoundWithAllOfTheirBlocks) {
  const auto shape = shape_of({{Role::embedding, 0},
                               {Role::norm, 0},
                               {Role::tile, 0},
                               {Role::mid_norm, 0},
                               {Role::tile, 0},
                               {Role::layer, 1},
                               {Role::router, 1},
                               {Role::expert, 1},
                               {Role::layer, 2},
                               {Role::head, 0}});
  EXPECT_EQ(dealt(shape, 1), Devices(10, 0));
  EXPECT_EQ(dealt(shape, 2), (Devices{0, 0, 0, 0, 0, 1, 1, 1, 0, 1}));
  EXPECT_EQ(dealt(shape, 3), (Devices{0, 0, 0, 0, 0, 1, 1, 1, 2, 0}));
  EXPECT_EQ(dealt(shape, 8), (Devices{0, 0, 0, 0, 0, 1, 1, 1, 2, 3}));
}

TEST(Deal, TilesOfTheVocabularyGoRound) {
  const auto model = [](bool tied) {
    std::vector<std::pair<Role, std::uint32_t>> blocks(4, {Role::embedding, 0});
    for (std::uint32_t layer = 0; layer < 3; ++layer) blocks.emplace_back(Role::layer, layer);
    blocks.emplace_back(Role::head, 0);
    for (int tile = 0; tile < 4 && !tied; ++tile) blocks.emplace_back(Role::head_tile, 0);
    return shape_of(blocks, tied);
  };
  // The head begins after the last layer, with its norm and the first tile.
  EXPECT_EQ(dealt(model(false), 2), (Devices{0, 1, 0, 1, 0, 1, 0, 1, 1, 0, 1, 0}));
  EXPECT_EQ(dealt(model(false), 3), (Devices{0, 1, 2, 0, 0, 1, 2, 0, 0, 1, 2, 0}));
  EXPECT_EQ(dealt(model(false), 8), (Devices{0, 1, 2, 3, 0, 1, 2, 3, 3, 4, 5, 6}));
  // Tied tiles are those of the embedding.
  EXPECT_EQ(dealt(model(true), 4), (Devices{0, 1, 2, 3, 0, 1, 2, 0}));
}

TEST(Deal, AHeadThatIsTiedToOneBlockIsWithIt) {
  const auto shape = shape_of(
      {{Role::embedding, 0}, {Role::layer, 0}, {Role::layer, 1}, {Role::layer, 2}, {Role::head, 0}},
      true);
  EXPECT_EQ(dealt(shape, 2), (Devices{0, 0, 1, 0, 0}));
}

TEST(Devices, AreRefusedWithMicroBatchMajorOrder) {
  BuildArguments placed = equal_blocks(4, 2);
  placed.problem.devices = 2;
  placed.options.order = Order::micro_batch_major;
  test::expect_error(ErrorCategory::config,
                     {"only one of the 2 devices would work at a time", "layer-major"},
                     [&] { build(placed); });
  placed.options.order = Order::layer_major;
  placed.problem.devices = 9;
  test::expect_error(ErrorCategory::config, {"1 to 8 devices"}, [&] { build(placed); });
}

/// Bytes of homes, by tier and kind.
std::map<std::pair<Tier, Kind>, Bytes> homes_in(const BuildArguments& placed) {
  std::map<std::pair<Tier, Kind>, Bytes> sums;
  for (const Buffer& buffer : build(placed).buffers) {
    const bool home = buffer.kind == Kind::weights || buffer.kind == Kind::states ||
                      buffer.kind == Kind::gradients || buffer.kind == Kind::undo;
    if (home) sums[{buffer.tier, buffer.kind}] += buffer.bytes;
    EXPECT_TRUE(buffer.device < placed.problem.devices) << buffer.name;
    EXPECT_TRUE(buffer.tier != Tier::nvme || buffer.device == 0) << buffer.name;
  }
  return sums;
}

TEST(Devices, HaveHomesThatAddUpToThoseOfOneDevice) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    BuildArguments placed = random_problem(seed, {.ranks = seed % 2 == 1});
    placed.options.order = Order::layer_major;
    const auto one = homes_in(placed);
    for (const std::uint32_t devices : {2U, 3U, 8U}) {
      placed.problem.devices = devices;
      ASSERT_EQ(homes_in(placed), one) << seed << ", " << devices << " devices";
    }
  }
}

TEST(Devices, HaveTheirHomesInHostMemoryNearThem) {
  BuildArguments placed = equal_blocks(4, 2);
  placed.problem.devices = 2;
  for (BlockPlacement& block : placed.placement.blocks) {
    block.weights = block.optimizer = block.activations = Tier::host;
  }
  const auto dealt_to = deal(placed.problem.program(), 2);
  std::map<std::pair<Kind, std::uint8_t>, std::uint32_t> homes;
  for (const Buffer& buffer : build(placed).buffers) {
    if (buffer.tier == Tier::host) ++homes[{buffer.kind, buffer.device}];
  }
  for (std::uint8_t d = 0; d < 2; ++d) {
    const auto blocks = static_cast<std::uint32_t>(std::count(dealt_to.begin(), dealt_to.end(), d));
    ASSERT_GT(blocks, 0U);
    for (const Kind kind : {Kind::weights, Kind::states, Kind::gradients}) {
      EXPECT_EQ((homes[{kind, d}]), blocks) << to_string(kind) << " of device " << int{d};
    }
    EXPECT_GT((homes[{Kind::activations, d}]), 0U) << "inputs that wait for device " << int{d};
  }
}

/// Seconds of a layer, forward and backward, and of a forward pass through the whole head.
constexpr double kLayer = 4.0;
struct Model {
  std::uint32_t layers;
  double head;
  std::uint32_t tiles;

  /// Seconds of the forward and backward pass through a tile of the head.
  [[nodiscard]] double tile() const { return 3.0 * head / tiles; }
};

/// Training with layers that take 1 second forward and 3 backward.
BuildArguments pipeline(const Model& of, std::uint32_t devices, std::uint32_t micro_batches) {
  model::ProgramShape shape = {
      .activation = 64, .batch = 64, .rows = 64, .partial_sums = 64, .losses = 8};
  BuildArguments made;
  const auto add = [&](Role role, double flops, std::uint32_t layer) {
    shape.blocks.push_back({.name = "block",
                            .role = role,
                            .forward_flops = flops,
                            .recomputed_flops = flops,
                            .gradient = 64,
                            .layer = layer});
    made.problem.blocks.push_back(
        {.weight_bytes = 64, .gradient_bytes = 64, .sub_groups = {{64, 64, 64}}});
  };
  for (std::uint32_t t = 0; t < of.tiles; ++t) add(Role::embedding, 0.0, 0);
  for (std::uint32_t layer = 0; layer < of.layers; ++layer) add(Role::layer, 1.0, layer);
  // Visits compute the logits twice: 4 times the forward pass.
  add(Role::head, of.tiles == 1 ? of.tile() / 4.0 : 0.0, 0);
  for (std::uint32_t t = 0; t < of.tiles && of.tiles > 1; ++t) {
    add(Role::head_tile, of.tile() / 4.0, 0);
  }
  made.problem.index = std::make_shared<const ProgramIndex>(model::write_program(shape));
  made.problem.micro_batches = micro_batches;
  made.problem.devices = devices;
  made.placement.blocks.resize(shape.blocks.size());
  return made;
}

/// The time of a step over that of devices that never wait, if only matrix products take time.
double time_over_ideal(const BuildArguments& placed) {
  plan::Rates rates = plan::unit_rates();
  for (double* rate :
       {&rates.device_memory_per_second, &rates.update_per_second, &rates.upload_per_second,
        &rates.offload_per_second, &rates.peer_per_second}) {
    *rate = 1e15;
  }
  const Schedule schedule = build(placed);
  const plan::Prediction step = plan::simulate(schedule, rates, {.warm_up = 1, .measured = 1});
  return step.step_seconds / (schedule.steady.flops() / schedule.devices);
}

TEST(Devices, WaitOncePerStepForTheFirstAndLastMicroBatchOfTheOthers) {
  // One micro-batch passes a layer and a tile of the head on each other device.
  for (const std::uint32_t devices : {1U, 2U, 4U, 8U}) {
    for (const std::uint32_t micro_batches : {8U, 16U}) {
      const Model model = {.layers = 32, .head = 2.4, .tiles = 8};
      const double work = micro_batches * (model.layers * kLayer + 3.0 * model.head);
      const double wait = (devices - 1) * (kLayer + model.tile());
      EXPECT_NEAR(time_over_ideal(pipeline(model, devices, micro_batches)),
                  1.0 + wait * devices / work, 0.01)
          << devices << " devices, " << micro_batches << " micro-batches";
    }
  }
}

TEST(Devices, OfAPipelineWaitForLittleIfThereAreMoreMicroBatchesThanDevices) {
  struct Line {
    std::uint32_t devices;
    std::uint32_t micro_batches;
    double of_32_layers;  ///< Llama 3 8B: a head of 2.4 layers
    double of_80_layers;  ///< Llama 3 70B: a head of 1.2 layers
  };
  // Simulated apart from this project's plans, for a head that all devices share equally.
  const std::vector<Line> table = {{2, 8, 1.01, 1.00},  {2, 16, 1.00, 1.00}, {4, 8, 1.04, 1.02},
                                   {4, 16, 1.02, 1.01}, {8, 8, 1.20, 1.09},  {8, 16, 1.10, 1.04},
                                   {8, 32, 1.05, 1.02}};
  const Model small = {.layers = 32, .head = 2.4, .tiles = 128};
  const Model large = {.layers = 80, .head = 1.2, .tiles = 128};
  for (const auto& [devices, micro_batches, of_small, of_large] : table) {
    EXPECT_NEAR(time_over_ideal(pipeline(small, devices, micro_batches)), of_small, 0.01 * of_small)
        << devices << " devices, " << micro_batches << " micro-batches";
    EXPECT_NEAR(time_over_ideal(pipeline(large, devices, micro_batches)), of_large, 0.01 * of_large)
        << devices << " devices, " << micro_batches << " micro-batches";
  }
}

}  // namespace
}  // namespace ballast::step::devices_test
