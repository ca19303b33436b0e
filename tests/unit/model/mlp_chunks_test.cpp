// Layers, and tiles of layers, whose MLP runs in chunks of rows.
#include <limits>
#include <ostream>
#include <string>

#include <gtest/gtest.h>

#include "ballast/model/family.h"

#include "src/model/compute/factories.h"
#include "tests/support/tags.h"
#include "tests/unit/model/fixture.h"
#include "tests/unit/model/layers_run.h"

namespace ballast::model::mlp_chunks_test {
namespace {

using test::Bench;
using Values = std::vector<double>;

constexpr std::size_t kThreads = 2;
/// Seven sequences; their rows do not fill the last chunk.
constexpr MicroBatchShape kShape = {7, 15};
constexpr std::size_t kWide = 80;  ///< intermediate_size

struct Case {
  const char* name;
  const char* family;
  DType type = DType::f32;
  bool joins = false;  ///< one product makes gate and up, as on CUDA
  std::uint64_t layer_tiles = 1;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.name;
}

std::vector<Case> cases() {
  return {{"llama", "llama"},
          {"llama_in_bf16", "llama", DType::bf16},
          {"llama_joined", "llama", DType::f32, true},
          {"phi3", "phi3"},
          {"gpt2", "gpt2"},
          {"gpt2_in_bf16", "gpt2", DType::bf16},
          {"gpt_neox", "gpt_neox"},
          {"olmo2", "olmo2"},
          {"olmo2_joined", "olmo2", DType::f32, true},
          {"gemma3", "gemma3"},
          {"gemma3_joined_in_bf16", "gemma3", DType::bf16, true}};
}

/// A model on the host device that stays below the device's own limit.
Bench make_whole(const Case& c) {
  ModelConfig config = default_config(c.family);
  config.vocab_size = 61;
  config.hidden_size = 32;
  config.num_layers = 2;
  config.num_heads = 2;
  config.num_kv_heads = 2;
  config.head_dim = 16;
  config.intermediate_size = kWide;
  config.max_sequence = kShape.length;
  config.layer_tiles = c.layer_tiles;
  return {config, c.type, kShape, kThreads};
}

/// That model with an MLP in chunks. The rows of kShape make at least three.
Bench make_cut(const Case& c) {
  Bench bench = make_whole(c);
  bench.compute = host::make_host_compute(bench.architecture, c.type, kShape, kThreads,
                                          {.bytes = 12 * kKiB, .joins_gate_and_up = c.joins});
  const Bytes workspace = bench.compute->sizes().workspace;
  bench.compute->set_workspace(bench.device->allocate(workspace, "another workspace"));
  return bench;
}

/// Outputs of the passes of one layer.
struct Results {
  Values out;
  Values dx;
  Values gradient;
};

/// `first`: overwrites accumulators full of NaN. Otherwise adds to zeros.
Results run(Bench b, bool keep, bool first) {
  const float before = first ? std::numeric_limits<float>::quiet_NaN() : 0.0F;
  const auto gradient = b.gradient(std::vector<float>(b.architecture.blocks[1].elements, before));
  if (first) b.compute->clear_gradient(*b.stream, 1, gradient);
  const DeviceBytes weights = b.upload(b.weights(1));
  const DeviceBytes in = b.upload(b.activation_values(9));
  const DeviceBytes out = b.activation();
  const DeviceBytes dy = b.upload(b.activation_values(10));
  const DeviceBytes kept =
      keep ? b.device->allocate(b.compute->sizes().intermediates[1], "intermediates")
           : DeviceBytes();
  b.kernels().layer_forward(*b.stream, 1, weights, {}, in, out, kept);
  // A call for another layer overwrites the workspace in between.
  b.kernels().layer_forward(*b.stream, 2, b.upload(b.weights(2)), {}, in, b.activation(), {});
  b.kernels().layer_backward(*b.stream, 1, weights, {}, in, dy, gradient,
                             first ? Accumulation::first : Accumulation::later, kept);
  b.stream->synchronize();
  return {b.download(out), b.download(dy), b.values(gradient)};
}

class MlpInChunks : public testing::TestWithParam<Case> {};

TEST_P(MlpInChunks, GivesTheSameBitsWhetherIntermediatesAreKeptOrNot) {
  const Results expected = run(make_cut(GetParam()), false, false);
  for (const bool keep : {false, true}) {
    for (const bool first : {false, true}) {
      const Results found = run(make_cut(GetParam()), keep, first);
      EXPECT_EQ(found.out, expected.out) << keep << first;
      EXPECT_EQ(found.dx, expected.dx) << keep << first;
      EXPECT_EQ(found.gradient, expected.gradient) << keep << first;
    }
  }
}

TEST_P(MlpInChunks, GivesNearlyTheSameAsAllRowsAtOnce) {
  const double tolerance = GetParam().type == DType::f32 ? 1e-6 : 1e-2;
  const Results cut = run(make_cut(GetParam()), false, false);
  const Bench bench = make_whole(GetParam());
  const Results whole = run(make_whole(GetParam()), false, false);
  EXPECT_LT(test::relative_error(cut.out, whole.out), tolerance);
  EXPECT_LT(test::relative_error(cut.dx, whole.dx), tolerance);
  for (const TensorSpec& tensor : bench.architecture.blocks[1].tensors) {
    const auto part = [&](const Results& of) {
      const auto begin = of.gradient.begin() + static_cast<std::ptrdiff_t>(tensor.offset);
      return Values(begin, begin + static_cast<std::ptrdiff_t>(tensor.size));
    };
    EXPECT_LT(test::relative_error(part(cut), part(whole)), tolerance) << tensor.name;
  }
}

TAG_TESTS("slow_sanitized", "*MlpInChunks.NeedsLess*");
TEST_P(MlpInChunks, NeedsLessMemoryUnlessItKeepsIntermediates) {
  const KernelSizes whole = make_whole(GetParam()).compute->sizes();
  const KernelSizes cut = make_cut(GetParam()).compute->sizes();
  EXPECT_EQ(cut.intermediates, whole.intermediates);
  // The place of the MLP's arrays then contains gradients of queries, keys and values.
  const std::size_t arrays = std::string(GetParam().family).starts_with("gpt") ? 2 : 3;
  const std::size_t saved = arrays * kWide - 3 * 32;
  EXPECT_LE(cut.workspace + kShape.tokens() * saved * size_of(GetParam().type),
            whole.workspace + kPage);
}

INSTANTIATE_TEST_SUITE_P(Families, MlpInChunks, testing::ValuesIn(cases()),
                         [](const auto& info) { return std::string(info.param.name); });

class TilesInChunks : public testing::TestWithParam<Case> {};

TEST_P(TilesInChunks, GiveNearlyTheSameAsLayersInOnePiece) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double tolerance = GetParam().type == DType::f32 ? 3e-6 : 2e-2;
  Case one_piece = GetParam();
  one_piece.layer_tiles = 1;
  const test::LayerResults whole = test::LayersRun(make_whole(one_piece), true, nan).train();
  const test::LayerResults tiles = test::LayersRun(make_cut(GetParam()), true, nan).train();
  EXPECT_LT(test::relative_error(tiles.out, whole.out), tolerance);
  EXPECT_LT(test::relative_error(tiles.dx, whole.dx), tolerance);
  for (const auto& [name, expected] : whole.gradients) {
    EXPECT_LT(test::relative_error(tiles.gradients.at(name), expected), tolerance) << name;
  }
}

TAG_TESTS("slow_sanitized", "*TilesInChunks.NeedLess*");
TEST_P(TilesInChunks, NeedLessMemoryThanAllRowsAtOnce) {
  EXPECT_LT(make_cut(GetParam()).compute->sizes().workspace,
            make_whole(GetParam()).compute->sizes().workspace);
}

INSTANTIATE_TEST_SUITE_P(Families, TilesInChunks,
                         testing::Values(Case{"llama", "llama", DType::f32, false, 2},
                                         Case{"llama_joined", "llama", DType::f32, true, 2},
                                         Case{"llama_in_bf16", "llama", DType::bf16, false, 2},
                                         Case{"qwen2_joined_in_bf16", "qwen2", DType::bf16, true,
                                              2}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace ballast::model::mlp_chunks_test
