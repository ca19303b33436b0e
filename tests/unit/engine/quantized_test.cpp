#include <algorithm>
#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/dtype.h"
#include "ballast/engine/engine.h"
#include "ballast/setup/setup.h"

#include "tests/support/function_weights.h"
#include "tests/support/tags.h"
#include "tests/unit/engine/tiny_engine.h"

// Runs whose frozen matrices are quantised.

namespace ballast::engine::quantized_test {
namespace {

using QuantizedBase = test::TinyEngine;
using test::kOptimizer;
using test::kWeights;

const std::string kAdapters =
    R"(ballast.adapters={"targets": ["q_proj", "o_proj", "down_proj"], "rank": 4, "alpha": 16})";
const std::vector<std::string> kLora = {"ballast.train=adapters", kAdapters};
const std::vector<std::string> kDora = {"ballast.train=adapters", kAdapters,
                                        "ballast.adapters.dora=true"};

std::vector<std::string> with(std::vector<std::string> overrides,
                              const std::vector<std::string>& more) {
  overrides.insert(overrides.end(), more.begin(), more.end());
  return overrides;
}

/// Values from another engine's blocks without magnitudes, which are computed from them.
test::FunctionWeights decoded(Engine& engine) {
  std::vector<std::vector<float>> blocks;
  for (std::size_t b = 0; b < engine.blueprint().model.blocks.size(); ++b) {
    blocks.push_back(engine.snapshot().read_block(b));
  }
  return {[model = engine.blueprint().model, blocks](const model::TensorSpec& tensor, Elems first,
                                                     std::span<float> out) {
    for (std::size_t b = 0; b < blocks.size(); ++b) {
      const model::TensorSpec* const there = model.blocks[b].find(tensor.name);
      if (there == nullptr) continue;
      const auto from = blocks[b].begin() + static_cast<std::ptrdiff_t>(there->offset + first);
      std::copy_n(from, out.size(), out.begin());
    }
  }};
}

TAG_TESTS("one_thread", "QuantizedBase.*");
/// A quantised base computes what the dequantised base computes, in every placement.
TEST_F(QuantizedBase, HasTheLossesOfTheDecodedBase) {
  const std::vector<std::vector<std::string>> formats = {
      {"ballast.quantized_base=int8"},
      {"ballast.quantized_base=nf4"},
      {"ballast.quantized_base=nf4", "ballast.double_quantization=true"}};
  const std::vector<const char*> places = {"cpu", "none", "nvme"};
  for (std::size_t f = 0; f < formats.size(); ++f) {
    const std::vector<std::string> placed = {kWeights + places[f], kOptimizer + "cpu"};
    Engine quantized = setup::make_engine(config(with(with(kDora, formats[f]), placed)));
    Engine plain = setup::make_engine(config(kDora));
    Engine original = setup::make_engine(config(kDora));
    quantized.start();
    test::start_from(plain, decoded(quantized));
    original.start();
    for (int step = 0; step < 3; ++step) {
      const auto tokens = ids(quantized, step);
      const auto targets = ids(quantized, step + 1);
      const TokenBatch batch = {tokens, targets};
      const StepResult one = quantized.train_step(batch, 0.05);
      const StepResult other = plain.train_step(batch, 0.05);
      EXPECT_EQ(one.loss, other.loss) << formats[f].back() << ", step " << step;
      EXPECT_EQ(one.grad_norm, other.grad_norm) << formats[f].back();
      EXPECT_NE(one.loss, original.train_step(batch, 0.05).loss) << formats[f].back();
    }
    for (std::size_t b = 0; b < quantized.blueprint().model.blocks.size(); ++b) {
      for (const model::TensorSpec& tensor : quantized.blueprint().model.blocks[b].tensors) {
        EXPECT_EQ(
            quantized.snapshot().read_weights(b, tensor),
            plain.snapshot().read_weights(b, plain.blueprint().model.blocks[b].tensor(tensor.name)))
            << tensor.name;
      }
    }
  }
}

/// Moves codes and scales of the frozen matrices, and everything else unquantised.
TEST_F(QuantizedBase, MovesItsCodes) {
  const std::vector<std::string> host = {kWeights + "cpu", kOptimizer + "cpu"};
  const Engine engine =
      setup::make_engine(config(with(with(kLora, {"ballast.quantized_base=nf4"}), host)));
  const Blueprint& blueprint = engine.blueprint();
  std::size_t uploads = 0;
  for (const plan::Operation& op : blueprint.schedule.steady.operations) {
    const bool uploads_weights =
        op.action == plan::Action::upload && op.payload == plan::Payload::weights;
    if (!uploads_weights || !blueprint.problem.program().is_layer(op.block)) continue;
    const model::BlockSpec& block = blueprint.model.blocks[op.block];
    Bytes expected = 0;
    Elems quantized = 0;
    for (const model::TensorSpec& tensor : block.tensors) {
      if (!tensor.quantized) continue;
      EXPECT_TRUE(tensor.frozen && tensor.shape.size() == 2) << tensor.name;
      quantized += tensor.size;
      expected += tensor.size / 2 + tensor.size / 64 * sizeof(float);
    }
    EXPECT_GT(quantized, block.elements / 2);
    expected = round_up(expected, kPage) + block.plain_elements() * sizeof(Bf16);
    EXPECT_EQ(op.bytes, expected);
    EXPECT_LT(op.bytes, block.elements);
    ++uploads;
  }
  EXPECT_GE(uploads, 2 * 3 - 1U);
}

/// Saved codes are resumed from, in another placement, too.
TEST_F(QuantizedBase, IsSavedAsCodes) {
  const auto overrides = [&](const char* place) {
    return with(kLora, {"ballast.quantized_base=nf4", "ballast.double_quantization=true",
                        kWeights + place, kOptimizer + place});
  };
  Engine engine = setup::make_engine(config(overrides("none")));
  engine.start();
  const auto tokens = ids(engine, 1);
  const auto targets = ids(engine, 2);
  const TokenBatch batch = {tokens, targets};
  engine.train_step(batch, 0.05);
  std::map<std::tuple<std::size_t, StateKind>, std::vector<std::byte>> saved;
  engine.snapshot().save([&](const StateRange& range, ConstHostBytes bytes) {
    auto& array = saved[{range.block, range.kind}];
    array.resize(std::max<std::size_t>(array.size(), range.first * range.width + bytes.size()));
    std::copy(bytes.begin(), bytes.end(),
              array.begin() + static_cast<std::ptrdiff_t>(range.first * range.width));
  });
  EXPECT_TRUE(saved.contains({1, StateKind::codes}));
  EXPECT_FALSE(saved.contains({0, StateKind::codes}));
  Engine other = setup::make_engine(config(overrides("nvme")));
  other.resume(
      [&](const StateRange& range, HostBytes bytes) {
        const auto& array = saved.at({range.block, range.kind});
        std::copy_n(array.begin() + static_cast<std::ptrdiff_t>(range.first * range.width),
                    bytes.size(), bytes.begin());
      },
      1);
  EXPECT_EQ(other.snapshot().hash(), engine.snapshot().hash());
  EXPECT_EQ(other.train_step(batch, 0.05).loss, engine.train_step(batch, 0.05).loss);
}

}  // namespace
}  // namespace ballast::engine::quantized_test
