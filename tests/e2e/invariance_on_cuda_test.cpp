#include <algorithm>
#include <cstddef>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include "ballast/engine/engine.h"
#include "ballast/engine/run_states.h"
#include "ballast/setup/setup.h"

#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"
#include "tests/support/tiny_training.h"

// The invariant of the whole engine on the CUDA device: the tier of states, the device of their
// update (GPU or CPU), the overlap of transfers and the number of devices do not change a single
// bit of the results. With fewer GPUs than devices, several devices share one. Without a GPU its
// kernels run thread by thread on the host, so models and runs are small.

namespace ballast::engine::invariance_on_cuda_test {
namespace {

/// Variants that are compared.
enum class Extent { kernel_paths, all };

#if defined(BALLAST_EMULATED_GPU)
constexpr std::uint64_t kSteps = 4;  // an evaluation and a step after it
constexpr Extent kUnlessSlow = Extent::kernel_paths;
#else
constexpr std::uint64_t kSteps = 10;
constexpr Extent kUnlessSlow = Extent::all;
#endif

const std::string kGpt2 = R"("family": "gpt2", "vocab_size": 131, "hidden_size": 32,
                             "num_layers": 2, "num_heads": 2)";
const std::string kLlama = R"("family": "llama", "vocab_size": 131, "hidden_size": 48,
                              "num_layers": 2, "num_heads": 6, "num_kv_heads": 2,
                              "intermediate_size": 72)";

/// Gated delta nets and gated attention.
const std::string kDelta = R"("family": "qwen3_5", "vocab_size": 131, "hidden_size": 48,
                              "num_layers": 2, "num_heads": 2, "head_dim": 16,
                              "intermediate_size": 72, "full_attention_interval": 2,
                              "init_stddev": 0.1,
                              "linear_num_key_heads": 4, "linear_num_value_heads": 8,
                              "linear_key_head_dim": 8, "linear_value_head_dim": 8)";

const std::string kConvolutions = R"("family": "lfm2", "vocab_size": 131, "hidden_size": 32,
                              "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
                              "layer_types": ["conv", "full_attention", "conv"],
                              "intermediate_size": 96, "block_multiple_of": 8, "conv_bias": true)";

/// Norms without weights, and gates with their own map.
const std::string kMuse = R"("family": "muse_glimmer", "vocab_size": 131, "hidden_size": 32,
                              "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
                              "sliding_window": 7, "intermediate_size": 48,
                              "output_multiplier": 1.5)";

/// Norms after attention and of the experts' sum.
const std::string kNormedExperts = R"("family": "afmoe", "vocab_size": 131, "hidden_size": 32,
                              "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
                              "sliding_window": 7, "intermediate_size": 48, "num_experts": 3,
                              "num_experts_per_tok": 2, "num_shared_experts": 1,
                              "moe_intermediate_size": 16, "mup_enabled": true)";

/// Experts that read the norm of attention.
const std::string kParallelExperts = R"("family": "cohere2_moe", "vocab_size": 131,
                              "hidden_size": 32, "num_layers": 2, "num_heads": 4,
                              "num_kv_heads": 2, "head_dim": 8, "sliding_window": 7,
                              "first_k_dense_replace": 1, "intermediate_size": 16,
                              "num_experts": 3, "num_experts_per_tok": 2,
                              "num_shared_experts": 1, "logit_scale": 1.0)";

/// Shared keys and values, and inputs of layers.
const std::string kLinks = R"("family": "gemma4", "vocab_size": 131, "hidden_size": 32,
                              "num_layers": 3, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8,
                              "global_head_dim": 16, "intermediate_size": 40,
                              "sliding_window": 9,
                              "layer_types": ["sliding_attention", "full_attention",
                                              "full_attention"],
                              "num_kv_shared_layers": 1, "hidden_size_per_layer_input": 8,
                              "vocab_size_per_layer_input": 131)";

test::Outcome train(const std::string& model, bool bf16, bool packed,
                    std::vector<std::string> overrides, std::uint64_t steps = kSteps) {
  const test::TempDir directory;
  if (packed) overrides.insert(overrides.begin(), test::kPacked);
  for (const char* common : {"train_micro_batch_size_per_gpu=1", "data.sequence_length=19"}) {
    overrides.emplace_back(common);
  }
  return test::train(test::tiny_config(model, bf16, directory.path(), overrides), steps,
                     test::scattered_ids, nullptr, steps - 1);
}

/// Variants that other kernels compute than the reference: intermediates are kept or, in part,
/// computed again, and gradients come from another device or are added on the host.
std::vector<std::vector<std::string>> kernel_paths() {
  return {{"pipeline.stages=2", "zero_optimization.offload_optimizer.device=cpu",
           "ballast.recompute=false"},
          {"ballast.order=micro_batch_major_offload", "zero_optimization.offload_param.device=cpu",
           "ballast.activations=cpu",
           R"(ballast.placement=[{"blocks": 2, "recompute": "except_attention"}])"}};
}

/// Variants that differ in what is copied and when. Plans are those of the host device, on which
/// they are tried with all models.
std::vector<std::vector<std::string>> placements() {
  const std::string optimizer = "zero_optimization.offload_optimizer.device=";
  const std::string weights = "zero_optimization.offload_param.device=";
  return {{},
          {weights + "cpu", optimizer + "cpu", "ballast.update_threads=3"},
          {"pipeline.stages=3", weights + "nvme", optimizer + "nvme", "ballast.activations=nvme",
           "ballast.delay_seed=3"},
          {weights + "cpu",
           R"(ballast.placement=[{"blocks": "0-1", "weights": "nvme", "optimizer": "device"},
                                 {"blocks": 2, "weights": "device", "optimizer": "cpu"}])"},
          {"ballast.order=micro_batch_major", weights + "cpu", optimizer + "cpu"}};
}

void expect_invariance(const std::string& model, bool bf16, bool packed = false,
                       Extent extent = kUnlessSlow, std::uint64_t steps = kSteps) {
  const test::Outcome expected =
      train(model, bf16, packed, {"ballast.serial=true", "ballast.recompute=true"}, steps);
  EXPECT_LT(expected.losses.back(), expected.losses.front()) << "nothing was learnt";
  std::vector<std::vector<std::string>> variants = kernel_paths();
  if (extent == Extent::all) {
    for (const auto& placement : placements()) variants.push_back(placement);
  }
  for (const auto& variant : variants) {
    test::expect_same(train(model, bf16, packed, variant, steps), expected,
                      fmt::format("{}", fmt::join(variant, " ")));
  }
}

TEST(InvarianceOnCuda, Gpt2WithACutVocabularyInBf16) {
  expect_invariance(kGpt2 + R"(, "vocabulary_tiles": 3)", true);
}
TEST(InvarianceOnCuda, LlamaInFp16WithSkippedSteps) {
  const auto run = [](std::vector<std::string> overrides) {
    overrides.insert(overrides.begin(), test::kFp16.begin(), test::kFp16.end());
    return train(kLlama, false, false, overrides);
  };
  const test::Outcome expected = run({"ballast.recompute=true"});
  EXPECT_GT(test::skipped_steps(expected), 0);
  EXPECT_LT(expected.losses.back(), expected.losses.front()) << "nothing was learnt";
  test::expect_same(
      run({"zero_optimization.offload_optimizer.device=nvme",
           "zero_optimization.offload_param.device=cpu", "ballast.speculative_updates=9"}),
      expected, "updates on the host");
}
TEST(InvarianceOnCuda, LlamaInBf16) {
#if defined(BALLAST_EMULATED_GPU)
  const std::size_t before = test::FakeCuda::copied_to_peers;
#endif
  expect_invariance(kLlama + R"(, "vocabulary_tiles": 1)", true, false, Extent::all);
#if defined(BALLAST_EMULATED_GPU)
  EXPECT_GT(test::FakeCuda::copied_to_peers, before);
#endif
}
TEST(InvarianceOnCuda, PackedGatedDeltaNetsInBf16) {
  expect_invariance(kDelta, true, true);
}
TEST(InvarianceOnCuda, PackedShortConvolutionsInBf16) {
  expect_invariance(kConvolutions, true, true);
}
TEST(InvarianceOnCuda, PackedGatesAndNormsWithoutWeightsInBf16) {
  expect_invariance(kMuse, true, true);
}
TEST(InvarianceOnCuda, PackedExpertsBetweenNormsInBf16) {
  expect_invariance(kNormedExperts, true, true);
}
TEST(InvarianceOnCuda, PackedExpertsParallelToAttentionInBf16) {
  expect_invariance(kParallelExperts, true, true);
}
TEST(InvarianceOnCuda, PackedSharedKeysAndLayerInputsInBf16) {
  expect_invariance(kLinks, true, true, kUnlessSlow, std::max<std::uint64_t>(kSteps, 6));
}
TEST(InvarianceOnCuda, PackedLlamaInTilesInFp32) {
  expect_invariance(kLlama + R"(, "vocabulary_tiles": 2, "layer_tiles": 2)", false, true);
}

/// Start and resume do not depend on the sizes of the model.
const std::string kSmall = R"("family": "llama", "vocab_size": 131, "hidden_size": 16,
                              "num_layers": 1, "num_heads": 2, "num_kv_heads": 1,
                              "intermediate_size": 24)";

/// States after the start of a run, after two steps, and after a resume of these. An evaluation, a
/// save and the start of another engine leave them.
std::vector<std::uint64_t> hashes(const std::vector<std::string>& overrides) {
  const test::TempDir directory;
  std::vector<std::string> all = {"train_micro_batch_size_per_gpu=1", "data.sequence_length=19",
                                  "gradient_clipping=0"};
  all.insert(all.end(), overrides.begin(), overrides.end());
  const config::Config config = test::tiny_config(kSmall, true, directory.path(), all);
  Engine engine = setup::make_engine(config);
  engine.start();
  std::vector<std::uint64_t> found = {engine.snapshot().hash()};
  const test::Batch held_out =
      test::scattered_ids(engine.evaluation_micro_batches() * engine.blueprint().shape.tokens(), 3);
  engine.evaluate(held_out.view());
  EXPECT_EQ(engine.snapshot().hash(), found[0]) << "an evaluation changes the states";
  const std::size_t tokens = engine.blueprint().problem.tokens_per_step();
  for (const std::uint64_t step : {1, 2}) {
    engine.train_step(test::scattered_ids(tokens, step).view(), config.optimizer.lr);
  }
  found.push_back(engine.snapshot().hash());
  engine.evaluate(held_out.view());
  std::map<std::pair<std::size_t, StateKind>, std::vector<std::byte>> saved;
  engine.snapshot().save([&](const StateRange& range, ConstHostBytes bytes) {
    auto& array = saved[{range.block, range.kind}];
    array.insert(array.end(), bytes.begin(), bytes.end());
  });
  EXPECT_EQ(engine.snapshot().hash(), found[1]) << "an evaluation or a save changes the states";
  Engine after = setup::make_engine(config);
  after.resume(
      [&](const StateRange& range, HostBytes bytes) {
        const auto& array = saved.at({range.block, range.kind});
        std::copy_n(array.begin() + static_cast<std::ptrdiff_t>(range.first * range.width),
                    bytes.size(), bytes.begin());
      },
      engine.updates());
  found.push_back(after.snapshot().hash());
  EXPECT_EQ(found[2], found[1]) << "a resume changes the states";
  return found;
}

// Kernels are warmed up before the first step, which must not update anything. The host device has
// no warm-up.
TEST(InvarianceOnCuda, StartsAndResumesKeepStatesOfEveryOptimizer) {
  const std::map<std::string, std::string> parameters = {{"AdamW", "0.003"},  {"Adam", "0.003"},
                                                         {"Adagrad", "0.02"}, {"Lion", "0.001"},
                                                         {"SGD", "0.3"},      {"Adamax", "0.003"}};
  for (const cpu_adam::OptimizerRow& row : cpu_adam::kOptimizers) {
    const std::string type(row.title);
    const std::string optimizer =
        R"(optimizer={"type": ")" + type + R"(", "params": {"lr": )" + parameters.at(type) + "}}";
    for (const char* update : {"gated", "eager"}) {
      if (update == std::string("eager") && type != "AdamW" && type != "SGD") continue;
      SCOPED_TRACE(type + ", " + update);
      const std::string when = std::string("ballast.update=") + update;
      const auto on_device = hashes({optimizer, when});
      EXPECT_EQ(hashes({optimizer, when, "zero_optimization.offload_optimizer.device=cpu"}),
                on_device);
      const auto on_host_device = hashes({optimizer, when, "ballast.device=host"});
      EXPECT_EQ(on_host_device[0], on_device[0]) << "the warm-up changes the states";
    }
  }
}

}  // namespace
}  // namespace ballast::engine::invariance_on_cuda_test
