#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include "ballast/cpu_adam/updater.h"

#include "tests/e2e/invariance_models.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"
#include "tests/support/tiny_training.h"

// The invariant of the whole engine: the tier of states, the order and number of threads of their
// updates, and the overlap of transfers do not change a single bit of the results.

namespace ballast::engine::invariance_test {
namespace {

constexpr std::uint64_t kSteps = 18;
constexpr std::uint64_t kFewSteps = 6;

using Overrides = std::vector<std::string>;

test::Outcome train(const Model& model, bool bf16, Overrides overrides,
                    std::uint64_t steps = kSteps, const Overrides& common = {}) {
  overrides.insert(overrides.begin(), common.begin(), common.end());
  if (!model.trained.empty()) overrides.push_back("ballast.train=" + model.trained);
  const test::TempDir directory;
  std::filesystem::create_directory(directory.path() / "second");
  return test::train(test::tiny_config(model.section, bf16, directory.path(), overrides), steps,
                     test::scattered_ids);
}

struct Variant {
  std::string name;
  Overrides overrides;
};

const std::string optimizer = "zero_optimization.offload_optimizer.device=";
const std::string weights = "zero_optimization.offload_param.device=";

/// Variants with and without prefetched experts.
std::vector<Variant> variants_of_experts() {
  const std::string prefetch = "ballast.expert_prefetch=true";
  const std::string buffers = "ballast.device_weight_buffers=6";
  const std::string staging = "zero_optimization.offload_param.buffer_count=5";
  return {
      {"prefetch, weights on host", {weights + "cpu", optimizer + "cpu", buffers, prefetch}},
      {"prefetch, weights on host, optimizer on device", {weights + "cpu", buffers, prefetch}},
      {"prefetch, everything on NVMe, at random times",
       {weights + "nvme", optimizer + "nvme", "ballast.gradients=nvme", buffers, staging, prefetch,
        "ballast.delay_seed=8"}},
      {"prefetch, everything on NVMe, speculative",
       {weights + "nvme", optimizer + "nvme", "ballast.speculative_updates=30", buffers, staging,
        prefetch}},
      {"prefetch, micro-batch-major, weights on NVMe, optimizer on host",
       {weights + "nvme", optimizer + "cpu", "ballast.order=micro_batch_major", buffers, staging,
        prefetch}},
      {"everything on NVMe, speculative",
       {weights + "nvme", optimizer + "nvme", "ballast.speculative_updates=30"}},
      {"sums on host, prefetch, weights on host, at random times",
       {weights + "cpu", optimizer + "cpu", "ballast.order=micro_batch_major_offload", buffers,
        prefetch, "ballast.delay_seed=11"}},
      {"weights on host, speculative, micro-batch-major",
       {weights + "cpu", optimizer + "cpu", "ballast.speculative_updates=30",
        "ballast.order=micro_batch_major"}},
  };
}

/// Variants whose blocks are dealt to several devices.
std::vector<Variant> variants_of_devices() {
  const auto on = [](int devices, Overrides overrides) {
    overrides.push_back(fmt::format("pipeline.stages={}", devices));
    return Variant{fmt::format("{} devices: {}", devices, fmt::join(overrides, " ")), overrides};
  };
  return {
      on(2, {}),
      on(3, {weights + "cpu", optimizer + "cpu", "ballast.delay_seed=9"}),
      on(2, {weights + "nvme", optimizer + "nvme", "ballast.activations=nvme",
             "ballast.gradients=nvme", "ballast.delay_seed=10"}),
      on(3, {weights + "cpu", optimizer + "cpu", "ballast.speculative_updates=30",
             "ballast.activations=host", "ballast.recompute=except_attention"}),
      on(2, {weights + "cpu", "ballast.recompute=true", "ballast.serial=true"}),
      on(3, {weights + "nvme", optimizer + "cpu", "ballast.recompute=false",
             "ballast.device_weight_buffers=1", "ballast.device_gradient_buffers=1"}),
  };
}

std::vector<Variant> variants() {
  std::vector<Variant> list = {
      {"all on device, serial", {"ballast.serial=true"}},
      {"every layer computed again", {"ballast.recompute=true"}},
      {"some layers computed again, weights and optimizer on the host",
       {weights + "cpu", optimizer + "cpu", "ballast.recompute=false",
        R"(ballast.placement=[{"blocks": 1, "recompute": true},
                              {"blocks": 2, "recompute": "except_attention"}])"}},
      {"every layer computed again, micro-batch-major, at random times",
       {"ballast.order=micro_batch_major", "ballast.recompute=true", "ballast.delay_seed=5"}},
      {"weights on host", {weights + "cpu"}},
      {"optimizer on host", {optimizer + "cpu"}},
      {"weights and optimizer on host", {weights + "cpu", optimizer + "cpu"}},
      {"optimizer on NVMe", {optimizer + "nvme"}},
      {"weights and optimizer on NVMe", {weights + "nvme", optimizer + "nvme"}},
      {"weights and optimizer on NVMe, serial",
       {weights + "nvme", optimizer + "nvme", "ballast.serial=true"}},
      {"weights on NVMe, optimizer on device", {weights + "nvme"}},
      {"optimizer on NVMe by threads", {optimizer + "nvme", "aio.backend=threads"}},
      {"weights and optimizer on two NVMe paths",
       {weights + "nvme", optimizer + "nvme",
        R"(zero_optimization.offload_optimizer.nvme_path=[".", "second"])",
        R"(aio.paths=[{"path": ".", "read_gbps": 1, "write_gbps": 1},
                      {"path": "second", "read_gbps": 2, "write_gbps": 2, "queue_depth": 2}])"}},
      {"one staging buffer",
       {weights + "nvme", optimizer + "nvme",
        "zero_optimization.offload_optimizer.buffer_count=1"}},
      {"one block on the device at a time",
       {weights + "cpu", optimizer + "cpu", "ballast.device_weight_buffers=1",
        "ballast.device_gradient_buffers=1"}},
      {"four blocks on the device at a time",
       {weights + "cpu", optimizer + "cpu", "ballast.device_weight_buffers=4"}},
      {"states on the device in sub-groups", {"zero_optimization.sub_group_size=9000"}},
      {"sub-groups on NVMe, everything else too, at random times",
       {weights + "nvme", optimizer + "nvme", "ballast.gradients=nvme", "ballast.delay_seed=6",
        "zero_optimization.sub_group_size=9000"}},
      {"small sub-groups on NVMe, one buffer",
       {weights + "cpu", optimizer + "nvme", "zero_optimization.sub_group_size=2048",
        "zero_optimization.offload_optimizer.buffer_count=1"}},
      {"speculative sub-groups on host and NVMe",
       {weights + "cpu", optimizer + "cpu", "ballast.speculative_updates=9",
        "zero_optimization.sub_group_size=20000",
        R"(ballast.placement=[{"blocks": "0-1", "optimizer": "nvme"}])"}},
      {"automatic", {weights + "auto", optimizer + "auto"}},
      {"mixed",
       {weights + "cpu",
        R"(ballast.placement=[{"blocks": "0-1", "weights": "nvme", "optimizer": "device"},
                              {"blocks": 2, "weights": "device", "optimizer": "nvme"}])"}},
      {"activations and results of attention on host",
       {"ballast.activations=host", "ballast.recompute=except_attention"}},
      {"activations on host, everything else on NVMe",
       {weights + "nvme", optimizer + "nvme", "activation_checkpointing.cpu_checkpointing=true"}},
      {"activations and results of attention on NVMe",
       {"ballast.activations=nvme", "ballast.recompute=except_attention"}},
      {"gradients on NVMe", {optimizer + "cpu", "ballast.gradients=nvme"}},
      {"gradients on NVMe, one buffer",
       {weights + "nvme", optimizer + "nvme", "ballast.gradients=nvme",
        "ballast.gradient_buffers=1"}},
      {"some gradients on NVMe, speculative, at random times",
       {weights + "cpu", optimizer + "nvme", "ballast.speculative_updates=2",
        R"(ballast.placement=[{"blocks": "0-1", "gradients": "nvme"}])", "ballast.delay_seed=4"}},
      {"everything on NVMe, at random times",
       {weights + "nvme", optimizer + "nvme", "ballast.activations=nvme", "ballast.delay_seed=3"}},
      {"micro-batch-major, results of attention kept",
       {"ballast.order=micro_batch_major", "ballast.recompute=except_attention"}},
      {"micro-batch-major, weights and optimizer on NVMe, activations on host",
       {"ballast.order=micro_batch_major", weights + "nvme", optimizer + "nvme",
        "ballast.activations=host"}},
      {"sums on host, everything else on the device", {"ballast.order=micro_batch_major_offload"}},
      {"sums on host, every layer computed again, one buffer each, at random times",
       {"ballast.order=micro_batch_major_offload", weights + "cpu", optimizer + "cpu",
        "ballast.recompute=true", "ballast.device_weight_buffers=1",
        "ballast.device_gradient_buffers=1", "ballast.delay_seed=7"}},
      {"sums on host, intermediates kept, optimizer on host, speculative",
       {"ballast.order=micro_batch_major_offload", optimizer + "cpu", "ballast.recompute=false",
        "ballast.speculative_updates=9"}},
      {"sums on host, results of attention on NVMe, everything else too",
       {"ballast.order=micro_batch_major_offload", weights + "nvme", optimizer + "nvme",
        "ballast.gradients=nvme", "ballast.activations=nvme",
        "ballast.recompute=except_attention"}},
      {"1 update thread", {optimizer + "cpu", "ballast.update_threads=1"}},
      {"3 update threads", {optimizer + "cpu", "ballast.update_threads=3"}},
      {"throttled link", {weights + "cpu", optimizer + "cpu", "ballast.link_gbps=2"}},
  };
  for (const Isa isa : cpu_adam::available()) {
    list.push_back({fmt::format("update by {}", to_string(isa)),
                    {optimizer + "nvme", fmt::format("ballast.update_isa={}", to_string(isa))}});
  }
  return list;
}

void expect_same(const Model& model, bool bf16, const std::vector<Variant>& variants,
                 std::uint64_t steps, const Overrides& common) {
  const test::Outcome expected = train(model, bf16, {}, steps, common);
  // Which of two random completions is better cannot be learned.
  const bool pairs = model.name.find("pairs") != std::string::npos;
  EXPECT_TRUE(pairs ? expected.losses.back() != expected.losses.front()
                    : expected.losses.back() < expected.losses.front())
      << "nothing was learnt";
  for (const Variant& variant : variants) {
    test::expect_same(train(model, bf16, variant.overrides, steps, common), expected,
                      fmt::format("{}, {}", model.name, variant.name));
  }
}

void expect_invariance(const Model& model, bool bf16, std::uint64_t steps = kSteps,
                       const Overrides& common = {}) {
  expect_same(model, bf16, variants(), steps, common);
}

/// With several devices, "auto" would cut the vocabulary into more tiles.
void expect_invariance_of_devices(Model model, bool bf16, const Overrides& common = {}) {
  if (model.section.find("vocabulary_tiles") == std::string::npos) model = cut(model, 1);
  expect_same(model, bf16, variants_of_devices(), kFewSteps, common);
}

/// Compares a third of the variants.
void expect_some_invariance(const Model& model, bool bf16, std::size_t first,
                            const Overrides& common = {}) {
  const std::vector<Variant> all = variants();
  std::vector<Variant> some;
  for (std::size_t i = first; i < all.size(); i += 3) some.push_back(all[i]);
  expect_same(model, bf16, some, kFewSteps, common);
}

TEST(Invariance, Gpt2InBf16) {
  expect_invariance(kGpt2, true);
}
TEST(Invariance, PackedGpt2InTilesInFp32) {
  expect_invariance(cut_everywhere(kGpt2, 2), false, kFewSteps, {test::kPacked});
}
TEST(Invariance, LlamaInBf16) {
  expect_invariance(kLlama, true, kFewSteps);
}
TEST(Invariance, LlamaWithACutVocabularyInFp32) {
  expect_some_invariance(cut(kLlama, 5), false, 0);
}
TEST(Invariance, PackedTiedLlamaInTilesInBf16) {
  expect_invariance(with_dynamic_scaling(cut_everywhere(kTiedLlama, 3)), true, kFewSteps,
                    {test::kPacked});
}

TEST(Invariance, ExpertsInBf16) {
  expect_some_invariance(kExperts, true, 2);
  const test::TempDir directory;
  Engine engine =
      planner::make_engine(test::tiny_config(kExperts.section, true, directory.path(), {}));
  engine.start();
  const std::size_t tokens = engine.blueprint().problem.tokens_per_step();
  std::size_t idle = 0;
  for (std::uint64_t step = 0; step < kFewSteps; ++step) {
    const auto layers =
        engine.train_step(test::scattered_ids(tokens, step).view(), 0.003).expert_rows;
    for (const auto& rows : layers) idle += std::count(rows.begin(), rows.end(), 0U);
  }
  EXPECT_GT(idle, kFewSteps);
}
TEST(Invariance, PackedExpertsInFp32) {
  expect_some_invariance(kAllExperts, false, 1, {test::kPacked});
}
TEST(Invariance, PackedLatentAttentionAndItsAdapters) {
  expect_some_invariance(kLatentExperts, true, 0, {test::kPacked});
  expect_same(training(kLatentExperts, "adapters"), false, variants_of_experts(), kFewSteps,
              {"model.router_bias_update_speed=0",
               R"(ballast.adapters={"targets": "all-linear", "modules_to_save": ["lm_head"]})",
               "ballast.quantized_base=nf4", test::kPacked});
}
TEST(Invariance, ExpertsThatMoveEarlyOrAreUpdatedEarly) {
  expect_same(kExperts, true, variants_of_experts(), kFewSteps, {});
}
TEST(Invariance, UpdatesOfTouchedExperts) {
  const Overrides active = {"ballast.expert_updates=active"};
  expect_some_invariance(kExperts, true, 0, active);
  expect_same(kExperts, true, variants_of_experts(), kFewSteps, active);
  EXPECT_NE(train(kExperts, true, {}, kFewSteps, active).states,
            train(kExperts, true, {}, kFewSteps).states);
}

TEST(Invariance, InFp16WithSkippedSteps) {
  for (const Model& model : {kGpt2, kExperts}) {
    const auto skipped = test::skipped_steps(train(model, false, {}, kFewSteps, test::kFp16));
    EXPECT_GT(skipped, 1) << model.name;
    EXPECT_LT(skipped, 4) << model.name;
  }
  expect_some_invariance(kGpt2, false, 0, test::kFp16);
  expect_same(kExperts, false,
              {{"everything on NVMe, speculative",
                {weights + "nvme", optimizer + "nvme", "ballast.speculative_updates=30"}},
               {"another instruction set", {optimizer + "cpu", "ballast.update_isa=scalar"}}},
              kFewSteps, test::kFp16);
}

TEST(Invariance, Gpt2WithPartsThatAreFrozenInBf16) {
  expect_invariance(training(kGpt2, R"(["*.wpe.weight", "*.h.0.attn.*", "*.h.1.ln_2.weight",
                                        "*.h.1.mlp.c_fc.*", "*.ln_f.bias"])"),
                    true, kFewSteps);
}
TEST(Invariance, LlamaWithFrozenLayersAtTheStartInFp32) {
  expect_some_invariance(training(cut(kLlama, 5), R"(["model.layers.[12].*", "lm_head.weight"])"),
                         false, 0);
}
TEST(Invariance, PackedTiedQwen3InTilesWithFrozenOnesInBf16) {
  expect_some_invariance(
      training(cut_everywhere(kTiedQwen3, 3), R"(["*.1.self_attn.[qk]_*", "*.2.mlp.up_proj.*"])"),
      true, 1, {test::kPacked});
}
TEST(Invariance, TiedVocabularyOfFrozenLayersInBf16) {
  expect_some_invariance(training(cut(kTiedLlama, 3), R"(["model.embed_tokens.weight"])"), true, 2);
}
TEST(Invariance, HeadAloneInBf16) {
  expect_invariance(training(kLlama, R"(["lm_head.weight"])"), true);
}
TEST(Invariance, ExpertsOfWhichSomeAreFrozenInBf16) {
  expect_some_invariance(training(kExperts, R"(["*.mlp.gate.weight", "*.experts.1?.*",
                                                "*.experts.2.up_proj.weight"])"),
                         true, 1);
}
TEST(Invariance, PackedExpertsWithFrozenBiasesAndSinksInFp32) {
  expect_some_invariance(
      training(kAllExperts, R"(["*.q_proj.weight", "*.experts.down_proj", "lm_head.weight"])"),
      false, 0, {test::kPacked});
}

TEST(Invariance, PackedGatedDeltaNetsInBf16) {
  expect_some_invariance(kDelta, true, 0, {test::kPacked});
  const std::string adapters = R"(ballast.adapters={"targets": "all-linear", "rank": 4})";
  expect_some_invariance(training(kDelta, "adapters"), true, 1,
                         {adapters, "ballast.quantized_base=nf4", test::kPacked});
}

TEST(Invariance, PackedGatedDeltaNetsInTilesInBf16) {
  expect_some_invariance(cut_everywhere(kDelta, 2), true, 2, {test::kPacked});
  expect_some_invariance(
      training(cut_everywhere(kDelta, 2), R"(["*.conv1d.weight", "*.2.linear_attn.norm.weight",
                                              "*.[kq]_norm.weight", "*.2.*.A_log"])"),
      true, 1, {test::kPacked});
}

TEST(Invariance, PackedSharedKeysAndLayerInputsInBf16) {
  expect_some_invariance(cut(kLinks, 3), true, 0, {test::kPacked});
  expect_same(training(kLinks, R"(["model.layers.[123].*"])"), false,
              {{"everything on NVMe", {weights + "nvme", optimizer + "nvme"}},
               {"every layer computed again", {"ballast.recompute=true"}}},
              kFewSteps, {});
  const std::string adapters = R"(ballast.adapters={"targets": "all-linear", "rank": 4})";
  expect_some_invariance(training(kLinks, "adapters"), true, 1,
                         {adapters, "ballast.quantized_base=nf4", test::kPacked});
}

/// The codes of a layer include those of its experts.
TEST(Invariance, PackedLayersWithExpertsInBf16) {
  expect_some_invariance(kGemma4, true, 0, {test::kPacked});
  expect_some_invariance(training(kGemma4, R"(["*embed_tokens*", "*.self_attn.*", "*.router.*"])"),
                         true, 1, {"ballast.quantized_base=nf4", test::kPacked});
}

/// Includes dropout, and modules that are trained in full.
TEST(Invariance, AdaptersInBf16) {
  Model model = training(kLlama, "adapters");
  model.section += R"(, "tie_embeddings": false)";
  expect_some_invariance(
      model, true, 0,
      {R"(ballast.adapters={"rank": 4, "alpha": 16, "dropout": 0.2, "modules_to_save": ["lm_head"],
                            "targets": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]})"});
}
/// Includes the passes of the reference model, and positions, because the length of a document
/// matters.
TEST(Invariance, AdaptersOnPairsInBf16) {
  Model model = training(with_dynamic_scaling(kLlama), "adapters");
  model.name += " on pairs";
  model.section += R"(, "tie_embeddings": false)";
  expect_some_invariance(
      model, true, 0,
      {R"(ballast.adapters={"rank": 4, "targets": ["q_proj", "down_proj"], "dora": true})",
       "data.tokens=[]", R"(data.pairs=["none"])", "ballast.quantized_base=nf4"});
}
/// The frozen experts are stored in 8 bits.
TEST(Invariance, AdaptersOfAttentionBeforeExpertsInFp32) {
  expect_some_invariance(training(kExperts, "adapters"), false, 2,
                         {R"(ballast.adapters={"targets": "all-linear", "dropout": 0.1,
                                               "modules_to_save": ["input_layernorm"]})",
                          "ballast.quantized_base=int8"});
}

/// Quantises the frozen matrices, and trains magnitudes.
TEST(Invariance, AdaptersOfABaseInFourBits) {
  Model model = training(kLlama, "adapters");
  model.section += R"(, "tie_embeddings": false)";
  expect_some_invariance(model, true, 1,
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
  if (planner::make_engine(config).arithmetic().find("threads") != std::string::npos) {
    GTEST_SKIP() << "the products of this CPU depend on the number of threads";
  }
  const auto same = [](const Model& model, bool bf16, const Overrides& common = {},
                       std::uint64_t steps = 2) {
    const auto on = [&](int threads) {
      return train(model, bf16, {fmt::format("ballast.compute_threads={}", threads)}, steps,
                   common);
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
  for (const Model& model : {kDelta, kGemma4, kLinks}) same(model, true, {test::kPacked});
  for (const bool bf16 : {true, false}) same(kExperts, bf16);
  same(kAllExperts, false, {test::kPacked});
  same(kAllExperts, false, test::kFp16);
  same(kLatentExperts, true, {test::kPacked});
  Model model = training(kLlama, "adapters");
  model.section += R"(, "tie_embeddings": false)";
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

TEST(Invariance, DevicesOfGpt2InBf16) {
  expect_invariance_of_devices(cut(kGpt2, 3), true);
}
TEST(Invariance, DevicesOfPackedTiedLlamaInTilesInBf16) {
  expect_invariance_of_devices(with_dynamic_scaling(cut_everywhere(kTiedLlama, 3)), true,
                               {test::kPacked});
}
TEST(Invariance, DevicesOfLlamaWithACutVocabularyInFp32) {
  expect_invariance_of_devices(cut(kLlama, 5), false);
}
TEST(Invariance, DevicesOfExpertsInBf16) {
  for (const Model& model : {kExperts, kLatentExperts}) expect_invariance_of_devices(model, true);
}
TEST(Invariance, DevicesOfSharedKeysAndLayerInputsInBf16) {
  expect_invariance_of_devices(kLinks, true);
}
TEST(Invariance, DevicesOfPackedExpertsInFp32) {
  expect_invariance_of_devices(kAllExperts, false, {test::kPacked});
}
TEST(Invariance, DevicesInFp16WithSkippedSteps) {
  expect_invariance_of_devices(cut(kGpt2, 3), false, test::kFp16);
}
TEST(Invariance, DevicesOfAdaptersOnPairsOverCodesInBf16) {
  Model model = training(with_dynamic_scaling(kLlama), "adapters");
  model.name += " on pairs";
  model.section += R"(, "tie_embeddings": false)";
  expect_invariance_of_devices(
      model, true,
      {R"(ballast.adapters={"rank": 4, "targets": ["q_proj", "down_proj"], "dora": true})",
       "data.tokens=[]", R"(data.pairs=["none"])", "ballast.quantized_base=nf4"});
}
TEST(Invariance, DevicesOfLlamaWithFrozenLayersInFp32) {
  expect_invariance_of_devices(
      training(cut(kLlama, 5), R"(["model.layers.[12].*", "lm_head.weight"])"), false);
}

/// Tiles only change the order of sums.
TEST(Invariance, ATiledModelHasTheLossesOfTheWholeModel) {
  const std::vector<std::pair<Model, Model>> pairs = {{kGpt2, cut(kGpt2, 3)},
                                                      {kLlama, cut(kLlama, 3)},
                                                      {kTiedLlama, cut(kTiedLlama, 3)},
                                                      {kLlama, cut_everywhere(kLlama, 1)}};
  for (const auto& [model, in_tiles] : pairs) {
    const test::Outcome whole = train(model, false, {}, kFewSteps);
    const test::Outcome tiles = train(in_tiles, false, {}, kFewSteps);
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
