#include <algorithm>
#include <filesystem>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include "ballast/core/random.h"
#include "ballast/cpu_adam/updater.h"

#include "tests/e2e/invariance_models.h"
#include "tests/support/covering.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"
#include "tests/support/tiny_training.h"

// The invariant of the whole engine: the tier of states, the order and number of threads of their
// updates, and the overlap of transfers do not change a single bit of the results.

namespace ballast::engine::invariance_test {
namespace {

constexpr std::uint64_t kSteps = 6;  // an evaluation and a step after it

test::Outcome train(const Model& model, bool bf16, Overrides overrides,
                    const Overrides& common = {}, std::uint64_t steps = kSteps) {
  overrides.insert(overrides.begin(), common.begin(), common.end());
  // So that every order is possible.
  overrides.insert(overrides.begin(), "ballast.router_losses=micro_batch");
  if (!model.trained.empty()) overrides.push_back("ballast.train=" + model.trained);
  const test::TempDir directory;
  std::filesystem::create_directory(directory.path() / "second");
  return test::train(test::tiny_config(model.section, bf16, directory.path(), overrides), steps,
                     test::scattered_ids, nullptr, kSteps - 1);
}

/// Settings that must not change a bit. Some of them have no effect together: a block whose
/// optimizer is on the device has its gradients there, for example.
std::vector<test::Axis> all_axes() {
  const std::string gradients = "ballast.gradients=";
  const std::string recompute = "ballast.recompute=";
  const std::string order = "ballast.order=";
  const std::string sub_group = "zero_optimization.sub_group_size=";
  test::Axis updates = {{}};
  for (const Isa isa : cpu_adam::available()) {
    updates.push_back({fmt::format("ballast.update_isa={}", to_string(isa)),
                       fmt::format("ballast.update_threads={}", 1 + updates.size() % 3)});
  }
  return {
      {{}, {weights + "cpu"}, {weights + "nvme"}},
      {{}, {optimizer + "cpu"}, {optimizer + "nvme"}},
      {{}, {"ballast.activations=host"}, {"ballast.activations=nvme"}},
      {{}, {gradients + "nvme"}, {gradients + "nvme", "ballast.gradient_buffers=1"}},
      {{}, {recompute + "true"}, {recompute + "false"}, {recompute + "except_attention"}},
      {{},
       {order + "micro_batch_major"},
       {order + "micro_batch_major_offload"},
       {"pipeline.stages=2"},
       {"pipeline.stages=3"}},
      {{}, {"ballast.serial=true"}, {"ballast.delay_seed=3"}, {"ballast.link_gbps=2"}},
      {{}, {"ballast.speculative_updates=2"}, {"ballast.speculative_updates=30"}},
      {{}, {sub_group + "20000"}, {sub_group + "9000"}, {sub_group + "2048"}},
      {{},
       {"ballast.device_weight_buffers=1", "ballast.device_gradient_buffers=1"},
       {"ballast.device_weight_buffers=4"}},
      {{}, {"zero_optimization.offload_optimizer.buffer_count=1"}},
      {{},
       {"aio.backend=threads"},
       {R"(zero_optimization.offload_optimizer.nvme_path=[".", "second"])",
        R"(aio.paths=[{"path": ".", "read_gbps": 1, "write_gbps": 1},
                      {"path": "second", "read_gbps": 2, "write_gbps": 2, "queue_depth": 2}])"}},
      updates,
      {{},
       {R"(ballast.placement=[{"blocks": "0-1", "gradients": "nvme", "optimizer": "nvme"},
                              {"blocks": 2, "recompute": "except_attention"}])"},
       {R"(ballast.placement=[{"blocks": "0-1", "weights": "nvme", "optimizer": "device"},
                              {"blocks": 2, "weights": "device", "optimizer": "nvme"}])"},
       {R"(ballast.placement=[{"blocks": 1, "recompute": true, "activations": "nvme"},
                              {"blocks": 2, "weights": "nvme", "optimizer": "cpu"}])"}},
  };
}

const std::vector<test::Axis>& axes() {
  static const std::vector<test::Axis> all = all_axes();
  return all;
}

std::vector<Variant> variants_of(const std::vector<test::Row>& rows) {
  std::vector<Variant> list;
  for (const test::Row& row : rows) {
    const Overrides overrides = test::overrides_of(axes(), row);
    list.push_back({fmt::format("{}", fmt::join(overrides, " ")), overrides});
  }
  return list;
}

void expect_same(Model model, bool bf16, const std::vector<Variant>& variants,
                 const Overrides& common = {}, std::uint64_t steps = kSteps) {
  // With several devices, "auto" would cut the vocabulary into more tiles.
  if (model.section.find("vocabulary_tiles") == std::string::npos) model = cut(model, 1);
  const test::Outcome expected = train(model, bf16, {}, common, steps);
  // Which of two random completions is better cannot be learned.
  const bool pairs = model.name.find("pairs") != std::string::npos;
  EXPECT_TRUE(pairs ? expected.losses.back() != expected.losses.front()
                    : expected.losses.back() < expected.losses.front())
      << "nothing was learnt";
  for (const Variant& variant : variants) {
    test::expect_same(train(model, bf16, variant.overrides, common, steps), expected,
                      fmt::format("{}, {}", model.name, variant.name));
  }
}

/// Each setting occurs with each setting of every other axis. Some steps exceed `clipping`, so that
/// speculative updates are undone.
void expect_invariance_of_pairs(const Model& model, double clipping, const Overrides& common = {}) {
  std::vector<Variant> variants = variants_of(test::rows_of_pairs(axes()));
  variants.push_back({"automatic", {weights + "auto", optimizer + "auto"}});
  Overrides all = common;
  all.push_back(fmt::format("gradient_clipping={}", clipping));
  const std::vector<double> norms = train(model, true, {}, all).norms;
  EXPECT_LT(*std::min_element(norms.begin(), norms.end()), clipping);
  EXPECT_GT(*std::max_element(norms.begin(), norms.end()), clipping);
  expect_same(model, true, variants, all);
}

/// Each setting occurs. The settings that occur together differ between models.
void expect_invariance(const Model& model, bool bf16, const Overrides& common = {},
                       std::uint64_t steps = kSteps) {
  const std::uint64_t seed =
      fnv1a(fmt::format("{} {} {}", model.name, bf16, fmt::join(common, " ")));
  expect_same(model, bf16, variants_of(test::rows_of_settings(axes(), seed)), common, steps);
}

/// Packed documents, all parts trained, and adapters over a base in four bits.
void expect_packed_invariance(const Model& model) {
  expect_invariance(model, true, {test::kPacked});
  const std::string adapters = R"(ballast.adapters={"targets": "all-linear", "rank": 4})";
  expect_invariance(training(model, "adapters"), true,
                    {adapters, "ballast.quantized_base=nf4", test::kPacked});
}

TEST(Invariance, VariantsCoverPairsAndSettings) {
  test::CoveredPairs pairs(axes());
  EXPECT_FALSE(pairs.missing().empty());
  for (const test::Row& row : test::rows_of_pairs(axes())) pairs.add(row);
  EXPECT_TRUE(pairs.missing().empty());
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const std::vector<test::Row> rows = test::rows_of_settings(axes(), seed);
    for (std::size_t a = 0; a < axes().size(); ++a) {
      std::set<std::size_t> found;
      for (const test::Row& row : rows) found.insert(row[a]);
      EXPECT_EQ(found.size(), axes()[a].size());
    }
  }
}

TEST(Invariance, Gpt2InBf16) {
  expect_invariance_of_pairs(kGpt2, 0.9);
}
TEST(Invariance, PackedGpt2InTilesInFp32) {
  expect_invariance(cut_everywhere(kGpt2, 2), false, {test::kPacked});
}
TEST(Invariance, LlamaInBf16) {
  expect_invariance(kLlama, true);
}
TEST(Invariance, LlamaWithACutVocabularyInFp32) {
  expect_invariance(cut(kLlama, 5), false);
}
TEST(Invariance, PackedTiedLlamaInTilesInBf16) {
  expect_invariance_of_pairs(with_dynamic_scaling(cut_everywhere(kTiedLlama, 3)), 1.7,
                             {test::kPacked});
}

TEST(Invariance, ExpertsInBf16) {
  expect_invariance(kExperts, true);
  const test::TempDir directory;
  Engine engine =
      setup::make_engine(test::tiny_config(kExperts.section, true, directory.path(), {}));
  engine.start();
  const std::size_t tokens = engine.blueprint().problem.tokens_per_step();
  std::size_t idle = 0;
  for (std::uint64_t step = 0; step < kSteps; ++step) {
    const auto layers =
        engine.train_step(test::scattered_ids(tokens, step).view(), 0.003).expert_rows;
    for (const auto& rows : layers) idle += std::count(rows.begin(), rows.end(), 0U);
  }
  EXPECT_GT(idle, kSteps);
}
TEST(Invariance, PackedExpertsInFp32) {
  expect_invariance(kAllExperts, false, {test::kPacked});
}
TEST(Invariance, PackedLatentAttentionAndItsAdapters) {
  expect_invariance(kLatentExperts, true, {test::kPacked});
  expect_same(training(kLatentExperts, "adapters"), false, variants_of_experts(),
              {"model.router_bias_update_speed=0",
               R"(ballast.adapters={"targets": "all-linear", "modules_to_save": ["lm_head"]})",
               "ballast.quantized_base=nf4", test::kPacked});
}
TEST(Invariance, ExpertsThatMoveEarlyOrAreUpdatedEarly) {
  expect_same(kExperts, true, variants_of_experts());
}
/// Layer-major order is the only one.
TEST(Invariance, RouterLossesOfTheStep) {
  std::vector<Variant> variants = variants_of(test::rows_of_settings(axes(), 17));
  for (Variant& variant : variants) {
    std::erase_if(variant.overrides, [](const std::string& one) {
      return one.starts_with("ballast.order=micro_batch_major");
    });
  }
  const Overrides step = {"ballast.router_losses=step"};
  expect_same(kExperts, true, variants, step);
  EXPECT_NE(train(kExperts, true, {}, step).states, train(kExperts, true, {}).states);
}
TEST(Invariance, UpdatesOfTouchedExperts) {
  const Overrides active = {"ballast.expert_updates=active"};
  expect_invariance(kExperts, true, active);
  expect_same(kExperts, true, variants_of_experts(), active);
  EXPECT_NE(train(kExperts, true, {}, active).states, train(kExperts, true, {}).states);
}

TEST(Invariance, InFp16WithSkippedSteps) {
  for (const Model& model : {kGpt2, kExperts}) {
    const auto skipped = test::skipped_steps(train(model, false, {}, test::kFp16));
    EXPECT_GT(skipped, 1) << model.name;
    EXPECT_LT(skipped, 4) << model.name;
  }
  expect_invariance(kGpt2, false, test::kFp16);
  expect_same(kExperts, false,
              {{"everything on NVMe, speculative",
                {weights + "nvme", optimizer + "nvme", "ballast.speculative_updates=30"}},
               {"another instruction set", {optimizer + "cpu", "ballast.update_isa=scalar"}}},
              test::kFp16);
}

TEST(Invariance, Gpt2WithPartsThatAreFrozenInBf16) {
  expect_invariance_of_pairs(
      training(kGpt2, R"(["*.wpe.weight", "*.h.0.attn.*", "*.h.1.ln_2.weight",
                                        "*.h.1.mlp.c_fc.*", "*.ln_f.bias"])"),
      0.65);
}
TEST(Invariance, LlamaWithFrozenLayersAtTheStartInFp32) {
  expect_invariance(training(cut(kLlama, 5), R"(["model.layers.[12].*", "lm_head.weight"])"),
                    false);
}
TEST(Invariance, PackedTiedQwen3InTilesWithFrozenOnesInBf16) {
  expect_invariance(
      training(cut_everywhere(kTiedQwen3, 3), R"(["*.1.self_attn.[qk]_*", "*.2.mlp.up_proj.*"])"),
      true, {test::kPacked});
}
TEST(Invariance, TiedVocabularyOfFrozenLayersInBf16) {
  expect_invariance(training(cut(kTiedLlama, 3), R"(["model.embed_tokens.weight"])"), true);
}
TEST(Invariance, HeadAloneInBf16) {
  expect_invariance(training(kLlama, R"(["lm_head.weight"])"), true, {}, 18);
}
TEST(Invariance, ExpertsOfWhichSomeAreFrozenInBf16) {
  expect_invariance(training(kExperts, R"(["*.mlp.gate.weight", "*.experts.1?.*",
                                                "*.experts.2.up_proj.weight"])"),
                    true);
}
TEST(Invariance, PackedExpertsWithFrozenBiasesAndSinksInFp32) {
  expect_invariance(
      training(kAllExperts, R"(["*.q_proj.weight", "*.experts.down_proj", "lm_head.weight"])"),
      false, {test::kPacked});
}

TEST(Invariance, PackedGatedDeltaNetsInBf16) {
  expect_packed_invariance(kDelta);
}

TEST(Invariance, PackedShortConvolutionsInBf16) {
  expect_packed_invariance(kConvolutions);
}

TEST(Invariance, PackedGatesAndNormsWithoutWeightsInBf16) {
  expect_invariance(kMuse, true, {test::kPacked});
  expect_invariance(
      training(kMuse, R"(["*.gate_proj.weight", "*.norm.weight", "*.1.*", "lm_head.*"])"), true,
      {test::kPacked});
}

TEST(Invariance, PackedExpertsBetweenNormsInBf16) {
  expect_invariance(kNormedExperts, true, {test::kPacked});
  expect_invariance(training(kNormedExperts, R"(["*layernorm*", "*.2.*"])"), true, {test::kPacked});
}

TEST(Invariance, PackedExpertsParallelToAttentionInBf16) {
  expect_packed_invariance(kParallelExperts);
}

TEST(Invariance, PackedClampedExpertsInFp32) {
  expect_invariance(kClampedExperts, false, {test::kPacked});
}

TEST(Invariance, PackedShortConvolutionsInTilesInBf16) {
  expect_invariance(cut_everywhere(kConvolutions, 2), true, {test::kPacked});
  expect_invariance(training(cut_everywhere(kConvolutions, 2),
                             R"(["*.conv.conv.weight", "*.2.conv.conv.bias", "*.k_layernorm.*",
                                 "*.embed_tokens.weight"])"),
                    true, {test::kPacked});
}

TEST(Invariance, PackedGatedDeltaNetsInTilesInBf16) {
  expect_invariance(cut_everywhere(kDelta, 2), true, {test::kPacked});
  expect_invariance(
      training(cut_everywhere(kDelta, 2), R"(["*.conv1d.weight", "*.2.linear_attn.norm.weight",
                                              "*.[kq]_norm.weight", "*.2.*.A_log"])"),
      true, {test::kPacked});
}

TEST(Invariance, PackedSharedKeysAndLayerInputsInBf16) {
  expect_invariance(cut(kLinks, 3), true, {test::kPacked});
  expect_same(training(kLinks, R"(["model.layers.[123].*"])"), false,
              {{"everything on NVMe", {weights + "nvme", optimizer + "nvme"}},
               {"every layer computed again", {"ballast.recompute=true"}}});
  const std::string adapters = R"(ballast.adapters={"targets": "all-linear", "rank": 4})";
  expect_invariance(training(kLinks, "adapters"), true,
                    {adapters, "ballast.quantized_base=nf4", test::kPacked});
}

/// The codes of a layer include those of its experts.
TEST(Invariance, PackedLayersWithExpertsInBf16) {
  expect_invariance(kGemma4, true, {test::kPacked});
  expect_invariance(training(kGemma4, R"(["*embed_tokens*", "*.self_attn.*", "*.router.*"])"), true,
                    {"ballast.quantized_base=nf4", test::kPacked});
}

/// Includes dropout, and modules that are trained in full.
TEST(Invariance, AdaptersInBf16) {
  expect_invariance(
      untied(kLlama), true,
      {R"(ballast.adapters={"rank": 4, "alpha": 16, "dropout": 0.2, "modules_to_save": ["lm_head"],
                            "targets": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]})"});
}
/// The reference model chooses other experts, whose weights move if either model has rows for them.
TEST(Invariance, AdaptersOnPairsOfExperts) {
  const Overrides on_pairs = {R"(ballast.adapters={"rank": 4, "targets": ["q_proj", "o_proj"]})",
                              "data.tokens=[]", R"(data.pairs=["none"])"};
  Model model = training(kExperts, "adapters");
  model.name += " on pairs";
  expect_invariance(model, true, on_pairs);
  expect_same(model, true, variants_of_experts(), on_pairs);
  Model latent = training(kLatentExperts, "adapters");
  latent.name += " on pairs";
  expect_same(latent, false, variants_of_experts(),
              test::joined(on_pairs, {"model.router_bias_update_speed=0",
                                      R"(ballast.adapters={"rank": 4, "targets": "all-linear"})",
                                      "ballast.quantized_base=nf4"}));
}
/// Includes the passes of the reference model, and positions, because the length of a document
/// matters.
TEST(Invariance, AdaptersOnPairsInBf16) {
  Model model = untied(with_dynamic_scaling(kLlama));
  model.name += " on pairs";
  expect_invariance(
      model, true,
      {R"(ballast.adapters={"rank": 4, "targets": ["q_proj", "down_proj"], "dora": true})",
       "data.tokens=[]", R"(data.pairs=["none"])", "ballast.quantized_base=nf4"});
}
/// The frozen experts are stored in 8 bits.
TEST(Invariance, AdaptersOfAttentionBeforeExpertsInFp32) {
  expect_invariance(training(kExperts, "adapters"), false,
                    {R"(ballast.adapters={"targets": "all-linear", "dropout": 0.1,
                                               "modules_to_save": ["input_layernorm"]})",
                     "ballast.quantized_base=int8"});
}

/// Some experts have no rows, so their gradients are zero.
TEST(Invariance, AdaptersOfAllExpertsInBf16) {
  expect_invariance(untied(kExperts), true,
                    {R"(ballast.adapters={"rank": 3, "modules_to_save": ["lm_head"], "targets":
                        ["q_proj", "experts.gate_up_proj", "experts.down_proj", "mlp.gate",
                         "shared_expert.up_proj", "shared_expert.down_proj"]})",
                     "ballast.quantized_base=nf4"});
}
TEST(Invariance, AdaptersOfSingleExpertsInFp32) {
  expect_same(training(kLatentExperts, "adapters"), false, variants_of_experts(),
              {"model.router_bias_update_speed=0",
               R"(ballast.adapters={"rank": 3, "targets": ["gate_proj", "down_proj"]})"});
}
TEST(Invariance, AdaptersOfTransposedExpertsInFp32) {
  expect_invariance(
      training(kAllExperts, "adapters"), false,
      {R"(ballast.adapters={"rank": 5, "targets": ["gate_up_proj", "down_proj", "mlp.router"]})",
       test::kPacked});
}

/// Quantises the frozen matrices, and trains magnitudes.
TEST(Invariance, AdaptersOfABaseInFourBits) {
  expect_invariance(untied(kLlama), true,
                    {R"(ballast.adapters={"targets": ["q_proj", "down_proj"], "rank": 4,
                                               "alpha": 16, "dora": true,
                                               "modules_to_save": ["lm_head"]})",
                     "ballast.quantized_base=nf4", "ballast.double_quantization=true"});
}

/// For CPUs whose products have the same bits on every number of threads. Some sums are longer than
/// what one product adds up.
TEST(Invariance, ComputeThreads) {
  const test::TempDir directory;
  const config::Config config = test::tiny_config(kGpt2.section, true, directory.path(), {});
  if (setup::make_engine(config).arithmetic().find("threads") != std::string::npos) {
    GTEST_SKIP() << "the products of this CPU depend on the number of threads";
  }
  const auto same = [](const Model& model, bool bf16, const Overrides& common = {},
                       std::uint64_t steps = 2) {
    const auto on = [&](int threads) {
      return train(model, bf16, {fmt::format("ballast.compute_threads={}", threads)}, common,
                   steps);
    };
    const test::Outcome expected = on(1);
    for (const int threads : {2, 3}) {
      test::expect_same(on(threads), expected,
                        fmt::format("{}, {} compute threads", model.name, threads));
    }
  };
  same(kGpt2, false, {}, 10);  // with an evaluation
  same(kGpt2, true, {test::kPacked});
  same(cut_everywhere(kTiedLlama, 3), false, {test::kPacked});
  for (const Model& model : {kDelta, kConvolutions, kMuse, kGemma4, kLinks}) {
    same(model, true, {test::kPacked});
  }
  for (const bool bf16 : {true, false}) same(kExperts, bf16);
  same(kAllExperts, false, {test::kPacked});
  same(kAllExperts, false, test::kFp16);
  same(kLatentExperts, true, {test::kPacked});
  Model model = untied(kLlama);
  same(model, false,
       {R"(ballast.adapters={"targets": ["q_proj", "down_proj"], "rank": 4, "dora": true})"});
  model.name += " on pairs";
  same(model, false,
       {R"(ballast.adapters={"targets": ["q_proj", "down_proj"], "rank": 4})", "data.tokens=[]",
        R"(data.pairs=["none"])"});
  same({"long sequences",
        R"("family": "llama", "vocab_size": 131, "hidden_size": 32, "num_layers": 1,
           "num_heads": 2, "intermediate_size": 48, "max_sequence": 2048)"},
       false, {"data.sequence_length=1100"});
}

/// Tiles only change the order of sums.
TEST(Invariance, ATiledModelHasTheLossesOfTheWholeModel) {
  const std::vector<std::pair<Model, Model>> pairs = {{kGpt2, cut(kGpt2, 3)},
                                                      {kLlama, cut(kLlama, 3)},
                                                      {kTiedLlama, cut(kTiedLlama, 3)},
                                                      {kLlama, cut_everywhere(kLlama, 1)}};
  for (const auto& [model, in_tiles] : pairs) {
    const test::Outcome whole = train(model, false, {});
    const test::Outcome tiles = train(in_tiles, false, {});
    ASSERT_EQ(tiles.losses.size(), whole.losses.size());
    for (std::size_t i = 0; i < whole.losses.size(); ++i) {
      EXPECT_NEAR(tiles.losses[i], whole.losses[i], 2e-4) << in_tiles.name << ", step " << i;
    }
  }
}

TEST(Invariance, AnotherSeedGivesAnotherResult) {
  const test::Outcome one = train(kGpt2, true, {});
  const test::Outcome other = train(kGpt2, true, {"ballast.seed=99"});
  EXPECT_NE(one.states, other.states);
  EXPECT_NE(one.losses, other.losses);
}

}  // namespace
}  // namespace ballast::engine::invariance_test
