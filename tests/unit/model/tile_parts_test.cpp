#include <cstddef>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/model/architecture.h"
#include "ballast/model/compute.h"
#include "ballast/model/family.h"

#include "tests/unit/model/fixture.h"

// A tile's part of a sum is complete before it is added. Then the sum does not depend on where the
// part is computed.

namespace ballast::model::tile_parts_test {
namespace {

using test::Bench;
using Floats = std::vector<float>;

constexpr MicroBatchShape kShape = {2, 21};

/// The products of the MLP's tiles sum over more values than a product adds at a time.
ModelConfig config_in_tiles() {
  ModelConfig c = default_config("llama");
  c.vocab_size = 61;
  c.hidden_size = 48;
  c.num_layers = 1;
  c.num_heads = 6;
  c.num_kv_heads = 2;
  c.head_dim = 8;
  c.intermediate_size = 2400;
  c.layer_tiles = 2;
  c.vocabulary_tiles = 1;
  return c;
}

/// sum[i] + part[i] in fp32.
Floats added(const Floats& sums, const Floats& parts) {
  Floats result = sums;
  for (std::size_t i = 0; i < result.size(); ++i) result[i] += parts[i];
  return result;
}

class TileParts : public testing::TestWithParam<DType> {
 protected:
  /// Calls pass(sums) with sums of these values and returns the sums after it.
  template <class Pass>
  Floats sums_after(Bench& b, const Floats& values, const Pass& pass) {
    const DeviceView<float> sums = b.gradient(values);
    pass(sums);
    return b.get(sums);
  }
  static Floats some_sums(const Bench& b) {
    const std::vector<double> exact = test::normals(b.activations(), 50, 3.0);
    return {exact.begin(), exact.end()};
  }
};

TEST_P(TileParts, OfLayersAreAddedOnce) {
  Bench b(config_in_tiles(), GetParam(), kShape);
  const Architecture& model = b.architecture;
  const DeviceBytes rows = b.device->allocate(b.compute->sizes().rows, "rows");
  const std::size_t norm = model.first_layer();
  b.kernels().normalize(*b.stream, norm, b.upload(b.weights(norm)),
                        b.upload(b.activation_values(3)), rows, {});
  const DeviceBytes dy = b.upload(b.activation_values(4));
  const Floats zeros(b.activations(), 0.0F);
  const Floats before = some_sums(b);
  for (std::size_t block = norm; block < model.head(); ++block) {
    const BlockContent content = model.blocks[block].content;
    if (content == BlockContent::norm) continue;
    SCOPED_TRACE(model.blocks[block].name);
    const DeviceBytes weights = b.upload(b.weights(block));
    const auto forward = [&](DeviceView<float> sums) {
      b.kernels().tile_forward(*b.stream, block, weights, {}, rows, sums, {});
    };
    const auto backward = [&](DeviceView<float> sums) {
      b.kernels().tile_backward(*b.stream, block, weights, {}, rows, dy, sums, {},
                                Accumulation::first);
    };
    EXPECT_EQ(sums_after(b, before, forward), added(before, sums_after(b, zeros, forward)));
    const Floats gradient = sums_after(b, zeros, backward);
    const bool begins = !model.is_layer_tile(block + 1);
    EXPECT_EQ(sums_after(b, before, backward), begins ? gradient : added(before, gradient));
  }
}

TEST_P(TileParts, OfTheHeadAreAddedOnce) {
  ModelConfig config = config_in_tiles();
  config.layer_tiles = 1;
  config.vocab_size = 3000;
  config.vocabulary_tiles = 2;
  Bench b(config, GetParam(), kShape);
  const DeviceBytes rows = b.device->allocate(b.compute->sizes().rows, "rows");
  const auto targets = b.upload_tokens(b.tokens(5));
  std::vector<test::OutputTile> tiles;
  for (std::size_t t = 0; t < 2; ++t) {
    tiles.push_back({t, b.upload(b.weights(b.architecture.tile(t).block))});
  }
  const std::size_t head = b.architecture.head();
  b.kernels().normalize(*b.stream, head, b.upload(b.weights(head)),
                        b.upload(b.activation_values(3)), rows, {});
  for (const test::OutputTile& tile : tiles) {
    b.kernels().head_scan(*b.stream, tile, targets, rows);
  }
  const Floats zeros(b.activations(), 0.0F);
  const Floats before = some_sums(b);
  for (const test::OutputTile& tile : tiles) {
    SCOPED_TRACE(tile.number);
    const auto differentiate = [&](DeviceView<float> sums) {
      b.kernels().head_differentiate(*b.stream, tile, targets, 0.5F, rows, sums,
                                     Accumulation::first);
    };
    const Floats gradient = sums_after(b, zeros, differentiate);
    EXPECT_EQ(sums_after(b, before, differentiate),
              tile.number == 1 ? gradient : added(before, gradient));
  }
}

INSTANTIATE_TEST_SUITE_P(Types, TileParts, testing::Values(DType::f32, DType::bf16),
                         [](const auto& info) { return std::string(to_string(info.param)); });

}  // namespace
}  // namespace ballast::model::tile_parts_test
