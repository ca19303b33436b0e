#include <algorithm>
#include <cmath>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include "ballast/core/random.h"

#include "tests/support/covering.h"
#include "tests/support/device_kind.h"
#include "tests/support/joined_ranks.h"
#include "tests/support/tags.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"
#include "tests/support/tiny_training.h"

// Run by all ranks of mpirun: stages, placements and the order of operations do not change a single
// bit of the common result, which equals that of one rank up to the order of sums.

namespace ballast::engine::ranks_matrix_test {
namespace {

using test::Overrides;

const std::string kGpt2 =
    R"("family": "gpt2", "vocab_size": 131, "hidden_size": 32, "num_layers": 2, "num_heads": 4)";
/// Blocks of few pages: with three ranks, one of them has almost nothing of a block.
const std::string kLlama = R"("family": "llama", "vocab_size": 131, "hidden_size": 24,
    "num_layers": 2, "num_heads": 3, "num_kv_heads": 1, "vocabulary_tiles": 3, "layer_tiles": 2)";

/// Few tokens for the experts, so some have none.
const std::string kExperts = R"("family": "qwen2_moe", "vocab_size": 131, "hidden_size": 24,
    "num_layers": 1, "num_heads": 3, "num_kv_heads": 1, "vocabulary_tiles": 2,
    "intermediate_size": 32, "num_experts": 24, "num_experts_per_tok": 1,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24,
    "output_router_logits": true, "router_aux_loss_coef": 0.1)";

/// Every rank has whole tables in every stage, and updates its shards of them.
const std::string kTables = R"("family": "gemma4", "vocab_size": 131, "hidden_size": 24,
    "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 12, "global_head_dim": 12,
    "intermediate_size": 32, "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 9, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 131)";

/// Without a GPU the kernels of the CUDA device run thread by thread on the host, so runs are short
/// on it and few.
bool on_cuda() {
  return test::device_kind() == "cuda";
}

/// A batch that is learned in a few steps.
test::Batch same_ids(std::size_t tokens, std::uint64_t) {
  return test::chained_ids(tokens, 1);
}

/// Sequences per step, all ranks together. On the host device 1, 2, 3 and 4 ranks can share them.
std::uint64_t sequences() {
  return on_cuda() ? 2 * std::uint64_t{test::joined_ranks().world()} : 12;
}

test::Outcome train(const config::Config& config, comm::Ranks* all) {
  return on_cuda() ? test::train(config, 3, same_ids, all)
                   : test::train(config, 12, test::chained_ids, all);
}

test::Outcome train(const std::string& model, bool bf16, Overrides overrides, comm::Ranks* all) {
  const test::TempDir directory;
  const std::uint64_t world = all == nullptr ? 1 : all->world();
  overrides.insert(overrides.begin(),
                   {"train_micro_batch_size_per_gpu=1", "ballast.eval_batches=1",
                    "ballast.router_losses=micro_batch",  // for every order
                    fmt::format("gradient_accumulation_steps={}", sequences() / world)});
  if (on_cuda()) overrides.emplace_back("data.sequence_length=9");
  const config::Config config = test::tiny_config(model, bf16, directory.path(), overrides);
  return train(config, all);
}

/// Several ranks share each sequence: all of them, or with `in_twos` two of them if their number is
/// even.
test::Outcome train_shared(const std::string& model, bool bf16, Overrides overrides,
                           comm::Ranks* all, bool in_twos = false) {
  const test::TempDir directory;
  const std::uint64_t world = all == nullptr ? 1 : all->world();
  const std::uint64_t size = in_twos && world % 2 == 0 ? 2 : world;
  overrides.insert(overrides.begin(),
                   {"train_micro_batch_size_per_gpu=2", "ballast.eval_batches=1",
                    fmt::format("gradient_accumulation_steps={}", sequences() * size / world / 2),
                    fmt::format("sequence_parallel_size={}", size)});
  overrides.push_back(fmt::format("data.sequence_length={}", on_cuda() ? 12 : 36));
  return train(test::tiny_config(model, bf16, directory.path(), overrides, world), all);
}

/// Blocks on every tier and on three devices.
const Overrides& mixed() {
  static const Overrides all = {
      "zero_optimization.offload_param.device=nvme",
      "zero_optimization.offload_optimizer.device=cpu",
      "pipeline.stages=3",
      "ballast.activations=host",
      "ballast.gradients=nvme",
      R"(ballast.placement=[{"blocks": 1, "weights": "device", "optimizer": "nvme"},
                            {"blocks": 2, "weights": "host", "optimizer": "device"}])"};
  return all;
}

/// Settings that must not change a bit.
std::vector<test::Axis> axes() {
  const std::string zero = "zero_optimization.", sub_group = zero + "sub_group_size=";
  const std::string optimizer = zero + "offload_optimizer.device=";
  const std::string weights = zero + "offload_param.device=";
  return {
      {{}, {weights + "cpu"}, {weights + "nvme"}},
      {{}, {optimizer + "cpu"}, {optimizer + "nvme"}},
      {{}, {"ballast.activations=host"}},
      {{}, {"ballast.gradients=nvme"}},
      {{},
       {"ballast.order=micro_batch_major"},
       {"ballast.order=micro_batch_major_offload"},
       {"pipeline.stages=2"},
       {"pipeline.stages=3"}},
      {{}, {"ballast.serial=true"}, {"ballast.delay_seed=5"}},
      {{}, {"ballast.speculative_updates=9"}, {"ballast.speculative_updates=2"}},
      {{}, {sub_group + "3000"}, {sub_group + "5000"}},
      {{},
       {R"(ballast.placement=[{"blocks": 1, "weights": "device", "optimizer": "nvme"},
                              {"blocks": 2, "weights": "nvme"}])"},
       {R"(ballast.placement=[{"blocks": 1, "weights": "nvme", "optimizer": "cpu"},
                              {"blocks": 2, "weights": "host", "optimizer": "device"}])"}},
  };
}

Overrides in_stage(int stage) {
  return {fmt::format("zero_optimization.stage={}", stage)};
}

std::vector<test::Axis> axes_and_stages() {
  std::vector<test::Axis> all = axes();
  all.push_back({in_stage(0), in_stage(1), in_stage(2), in_stage(3)});
  return all;
}

std::vector<Overrides> runs_of(const std::vector<test::Axis>& axes,
                               const std::vector<test::Row>& rows) {
  std::vector<Overrides> runs;
  for (const test::Row& row : rows) runs.push_back(test::overrides_of(axes, row));
  return runs;
}

/// Runs in the same stage. Each setting occurs.
std::vector<Overrides> placements(std::uint64_t seed) {
  return on_cuda() ? std::vector<Overrides>{mixed()}
                   : runs_of(axes(), test::rows_of_settings(axes(), seed));
}

void expect_close(const std::vector<double>& found, const std::vector<double>& expected,
                  double tolerance) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_NEAR(found[i], expected[i], tolerance * std::abs(expected[i])) << "step " << i + 1;
  }
}

/// Runs of every stage, in which each setting occurs or, for `pairs`, occurs with each other one.
/// The plans of the CUDA device are those of the host device.
enum class Extent { settings, pairs };
std::vector<Overrides> placements_in_stages(Extent extent, std::uint64_t seed) {
  const std::vector<test::Axis> all = axes_and_stages();
  if (!on_cuda()) {
    return runs_of(all, extent == Extent::pairs ? test::rows_of_pairs(all)
                                                : test::rows_of_settings(all, seed));
  }
  std::vector<Overrides> runs;
  for (int stage = 0; stage <= 3; ++stage) {
    if (extent == Extent::pairs || stage % 2 == 1)
      runs.push_back(test::joined(mixed(), in_stage(stage)));
  }
  return runs;
}

/// Compares placements in all stages with the simplest one. Some steps exceed `clipping`.
using Training = std::function<test::Outcome(const Overrides&)>;
void compare_all(const Training& train_with, double clipping, Overrides common,
                 Extent extent = Extent::settings) {
  common.push_back(fmt::format("gradient_clipping={}", clipping));
  const test::Outcome expected = train_with(test::joined(common, in_stage(0)));
  EXPECT_LT(expected.losses.back(), expected.losses.front()) << "nothing was learnt";
  const auto [smallest, largest] =
      std::minmax_element(expected.norms.begin(), expected.norms.end());
  if (!on_cuda()) {
    EXPECT_LT(*smallest, clipping) << "every step rolls back, the largest norm is " << *largest;
    EXPECT_GT(*largest, clipping) << "no step rolls back, the smallest norm is " << *smallest;
  }
  const std::uint64_t seed = fnv1a(test::text_of(common));
  for (const Overrides& placed : placements_in_stages(extent, seed)) {
    test::expect_same(train_with(test::joined(common, placed)), expected, test::text_of(placed));
  }
}

void compare_all(const std::string& model, bool bf16, double clipping, const Overrides& common,
                 Extent extent = Extent::settings) {
  compare_all(
      [&](const Overrides& overrides) {
        return train(model, bf16, overrides, &test::joined_ranks());
      },
      clipping, common, extent);
}

TAG_TESTS("2_ranks,2_ranks_emulated", "RanksMatrix.StagesAndPlacementsLearnTheSameBits");
TEST(RanksMatrix, StagesAndPlacementsLearnTheSameBits) {
  compare_all(kGpt2, true, 0.8, {}, Extent::pairs);
}

TAG_TESTS("3_ranks,3_ranks_emulated", "RanksMatrix.InFp32AndUneven");
TEST(RanksMatrix, InFp32AndUneven) {
  compare_all(kLlama, false, 0.45, {});
}

TAG_TESTS("3_ranks", "RanksMatrix.TablesInEveryStage");
TEST(RanksMatrix, TablesInEveryStage) {
  if (on_cuda()) GTEST_SKIP() << "layer inputs on the host device";
  compare_all(kTables, false, 1.4, {});
}
TAG_TESTS("2_ranks,2_ranks_emulated", "RanksMatrix.ExpertsInEveryStage");
TEST(RanksMatrix, ExpertsInEveryStage) {
  compare_all(kExperts, false, 0.45, {});
}
TAG_TESTS("2_ranks", "RanksMatrix.AdaptersOfExpertsInEveryStage");
TEST(RanksMatrix, AdaptersOfExpertsInEveryStage) {
  compare_all(kExperts, false, 0.00018,
              {"ballast.train=adapters", R"(ballast.adapters={"targets": ["gate_up_proj"]})"});
}
TAG_TESTS("3_ranks", "RanksMatrix.ExpertsThatAreTouchedAndMoveEarly");
TEST(RanksMatrix, ExpertsThatAreTouchedAndMoveEarly) {
  compare_all(kExperts, false, 0.45,
              {"ballast.expert_updates=active", "ballast.expert_prefetch=true",
               "ballast.device_weight_buffers=5"});
}

/// Experts with biases. Most of them have more rows than one round of exchanges moves.
const std::string kBusyExperts = R"("family": "gpt_oss", "vocab_size": 131, "hidden_size": 24,
                                    "num_layers": 2, "num_heads": 3, "num_kv_heads": 1,
                                    "head_dim": 8, "intermediate_size": 16,
                                    "num_local_experts": 12, "num_experts_per_tok": 8)";

std::string expert_parallel() {
  return fmt::format("ballast.expert_parallel={}", test::joined_ranks().world());
}

TAG_TESTS("3_ranks", "RanksMatrix.ExpertsThatStayOnTheirRanksInEveryStage");
TEST(RanksMatrix, ExpertsThatStayOnTheirRanksInEveryStage) {
  compare_all(kExperts, false, 0.45,
              {expert_parallel(), "ballast.expert_updates=active", "ballast.expert_prefetch=true",
               "ballast.device_weight_buffers=5"});
}

TAG_TESTS("2_ranks,2_ranks_emulated", "RanksMatrix.ExpertsThatStayOnTheirRanksLearnNearlyTheSame");
/// Sums of gradients have another order.
TEST(RanksMatrix, ExpertsThatStayOnTheirRanksLearnNearlyTheSame) {
  for (const std::string& model : {kExperts, kBusyExperts}) {
    if (on_cuda() && model == kExperts) continue;
    const auto with = [&](const Overrides& overrides) {
      return train(model, false, overrides, &test::joined_ranks());
    };
    const test::Outcome apart = with({expert_parallel()});
    const test::Outcome whole = with({});
    expect_close(apart.losses, whole.losses, 1e-5);
    expect_close(apart.norms, whole.norms, 1e-4);
    test::expect_same(with(test::joined({expert_parallel()}, mixed())), apart, "mixed");
  }
}

TAG_TESTS("3_ranks", "RanksMatrix.FrozenBlocksInEveryStage");
TEST(RanksMatrix, FrozenBlocksInEveryStage) {
  compare_all(kLlama, true, 0.24,
              {R"(ballast.train=["model.layers.1.*", "model.embed_tokens.*"])"});
  if (on_cuda()) return;
  compare_all(kGpt2, false, 0.24,
              {R"(ballast.train=["*.h.0.mlp.c_proj.*", "*.h.1.attn.*", "*.h.1.ln_1.*"])"});
}

TAG_TESTS("3_ranks", "RanksMatrix.AdaptersInEveryStage");
/// The base is in four bits, with magnitudes.
TEST(RanksMatrix, AdaptersInEveryStage) {
  compare_all(kGpt2, true, 0.1,
              {"ballast.train=adapters", "ballast.quantized_base=nf4",
               R"(ballast.adapters={"targets": ["c_attn", "mlp.c_proj"], "rank": 3, "alpha": 12,
                                    "dora": true, "modules_to_save": ["ln_f"]})"});
}

TAG_TESTS("2_ranks", "RanksMatrix.InFp16WithSkippedSteps");
/// All ranks skip the same steps.
TEST(RanksMatrix, InFp16WithSkippedSteps) {
  const auto with = [&](const Overrides& placed) {
    return train(kLlama, false, test::joined(test::kFp16, placed), &test::joined_ranks());
  };
  const test::Outcome expected = with(in_stage(0));
  EXPECT_GT(test::skipped_steps(expected), 0);
  EXPECT_GT(expected.norms.back(), 0.0) << "every step is skipped";
  for (const Overrides& placed : placements_in_stages(Extent::settings, 16)) {
    test::expect_same(with(placed), expected, test::text_of(placed));
  }
}

TAG_TESTS("3_ranks", "RanksMatrix.WithMomentsInEightBits");
TEST(RanksMatrix, WithMomentsInEightBits) {
  compare_all(kLlama, true, 0.45, {"ballast.optimizer_states=8bit"});
}

/// Stage 3 with `common`, and then also with `options` in several placements, must give the same
/// bits. kLlama runs in fp32, in which sums of squared gradients are not exact, kGpt2 in bf16.
void compare_stage_three(const std::string& model, const Overrides& common,
                         const Overrides& options) {
  const auto with = [&](const Overrides& more) {
    return train(model, model == kGpt2, test::joined(test::joined(common, in_stage(3)), more),
                 &test::joined_ranks());
  };
  const test::Outcome expected = with({});
  if (!on_cuda()) test::expect_same(with(options), expected, "all on device");
  for (const Overrides& placed : placements(fnv1a(options.back()))) {
    test::expect_same(with(test::joined(options, placed)), expected, test::text_of(placed));
  }
}

TAG_TESTS("4_ranks", "RanksMatrix.BlocksThatStayWholeInStageThreeLearnTheSameBits");
TEST(RanksMatrix, BlocksThatStayWholeInStageThreeLearnTheSameBits) {
  // Embedding and head (5376 and 64 parameters), or all blocks; a layer has 12704.
  for (const char* threshold : {"6000", "1e5"}) {
    if (on_cuda() && threshold != std::string("6000")) continue;
    compare_stage_three(
        kGpt2, {},
        {std::string("zero_optimization.stage3_param_persistence_threshold=") + threshold});
  }
}

TAG_TESTS("4_ranks", "RanksMatrix.WeightsSplitInGroupsLearnTheSameBits");
TEST(RanksMatrix, WeightsSplitInGroupsLearnTheSameBits) {
  const std::uint32_t world = test::joined_ranks().world();
  if (world < 4 || world % 2 != 0) GTEST_SKIP() << "several groups of several ranks";
  const std::string groups = fmt::format("zero_optimization.zero_hpz_partition_size={}", world / 2);
  for (const std::string& model : {kGpt2, kLlama}) compare_stage_three(model, {}, {groups});
}

TAG_TESTS("4_ranks,4_ranks_emulated", "RanksMatrix.GroupsWithTheOtherOptionsLearnTheSameBits");
TEST(RanksMatrix, GroupsWithTheOtherOptionsLearnTheSameBits) {
  const std::uint32_t world = test::joined_ranks().world();
  if (world < 4 || world % 2 != 0) GTEST_SKIP() << "several groups of several ranks";
  const std::string groups = fmt::format("zero_optimization.zero_hpz_partition_size={}", world / 2);
  // Some blocks are whole, and gathers are quantised. The bits of these options do not depend on
  // groups.
  compare_stage_three(kGpt2, {},
                      {groups, "zero_optimization.stage3_param_persistence_threshold=6000"});
  const std::string codes = "zero_optimization.zero_quantized_weights=true";
  compare_stage_three(kGpt2, {codes}, {groups});
}

TAG_TESTS("2_ranks,2_ranks_emulated",
          "RanksMatrix.QuantisedGathersLearnNearlyTheSameAndInEveryPlacementTheSameBits");
TEST(RanksMatrix, QuantisedGathersLearnNearlyTheSameAndInEveryPlacementTheSameBits) {
  for (const bool bf16 : {true, false}) {
    if (on_cuda() && !bf16) continue;
    const auto with = [&](bool quantised, const Overrides& placed) {
      const std::string codes =
          fmt::format("zero_optimization.zero_quantized_weights={}", quantised);
      return train(kGpt2, bf16, test::joined(test::joined(in_stage(3), {codes}), placed),
                   &test::joined_ranks());
    };
    const test::Outcome exact = with(false, {});
    const test::Outcome quantised = with(true, {});
    EXPECT_NE(quantised.losses, exact.losses) << "nothing was quantised";
    expect_close(quantised.losses, exact.losses, 0.01);
    for (const Overrides& placed : placements(bf16 ? 1 : 2)) {
      test::expect_same(with(true, placed), quantised, test::text_of(placed));
    }
  }
}

/// Master weights of all tensors after some steps.
std::vector<std::vector<float>> learnt_weights(const Overrides& options,
                                               const std::string& model = kGpt2,
                                               std::uint64_t steps = 3) {
  const test::TempDir directory;
  Overrides overrides = {"zero_optimization.stage=3"};
  overrides.insert(overrides.end(), options.begin(), options.end());
  comm::Ranks& ranks = test::joined_ranks();
  Engine engine = setup::make_engine(test::tiny_config(model, true, directory.path(), overrides),
                                     nullptr, &ranks);
  engine.start();
  const std::size_t tokens = engine.blueprint().problem.tokens_per_step();
  for (std::uint64_t step = 1; step <= steps; ++step) {
    const test::Batch batch = test::part_of(test::chained_ids(tokens, step), &ranks);
    engine.train_step({batch.tokens, batch.targets}, 0.003);
  }
  std::vector<std::vector<float>> found;
  const auto& blocks = engine.blueprint().model.blocks;
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    const std::vector<float> block = engine.snapshot().read_block(b);
    for (const auto& tensor : blocks[b].tensors) {
      found.push_back(engine.snapshot().read_weights(b, tensor));
      const auto part = std::span(block).subspan(tensor.offset, tensor.size);
      EXPECT_TRUE(std::equal(part.begin(), part.end(), found.back().begin())) << tensor.name;
    }
  }
  return found;
}

TAG_TESTS("4_ranks", "RanksMatrix.WeightsAreReadFromWhereverTheirPartsAre");
TEST(RanksMatrix, WeightsAreReadFromWhereverTheirPartsAre) {
  EXPECT_EQ(learnt_weights({expert_parallel()}, kExperts, 0), learnt_weights({}, kExperts, 0));
  const auto expected = learnt_weights({});
  const std::string zero = "zero_optimization.";
  EXPECT_EQ(learnt_weights({zero + "stage3_param_persistence_threshold=6000"}), expected);
  if (test::joined_ranks().world() != 4) return;
  EXPECT_EQ(learnt_weights({zero + "zero_hpz_partition_size=2"}), expected);
  EXPECT_EQ(
      learnt_weights({zero + "zero_hpz_partition_size=2", zero + "offload_param.device=nvme"}),
      expected);
}

TAG_TESTS("2_ranks", "RanksMatrix.AreCloseToOneRankAlone");
TEST(RanksMatrix, AreCloseToOneRankAlone) {
  for (const int stage : {0, 3}) {
    Overrides overrides = {fmt::format("zero_optimization.stage={}", stage)};
    if (stage == 3) overrides.insert(overrides.begin(), test::kPacked);
    const test::Outcome together = train(kGpt2, false, overrides, &test::joined_ranks());
    const test::Outcome alone = train(kGpt2, false, overrides, nullptr);
    expect_close(together.losses, alone.losses, 1e-5);
    expect_close(together.norms, alone.norms, 1e-4);
  }
}

/// A model with `extra` keys, whose heads of keys 2, 3 or 4 ranks can share.
std::string shared_model(const std::string& family, const std::string& extra = "") {
  const std::uint32_t keys = test::joined_ranks().world();
  return fmt::format(R"("family": "{}", "vocab_size": 131, "vocabulary_tiles": 2, "hidden_size": 32,
                        "num_layers": 2, "num_heads": {}, "num_kv_heads": {}, "head_dim": 8,
                        "intermediate_size": 48{})",
                     family, 2 * keys, keys, extra);
}

/// Learned positions; without grouped queries.
std::string shared_gpt2() {
  const std::uint32_t heads = 2 * test::joined_ranks().world();
  return fmt::format(R"("family": "gpt2", "vocab_size": 131, "hidden_size": {}, "num_layers": 2,
                        "num_heads": {})",
                     8 * heads, heads);
}

TAG_TESTS("2_ranks,3_ranks,4_ranks", "*SharedSequences*");
TEST(RanksMatrix, SharedSequencesInEveryStage) {
  compare_all(
      [](const Overrides& overrides) {
        return train_shared(shared_model("llama"), true, overrides, &test::joined_ranks(), true);
      },
      0.63, {test::kPacked});
}

/// Recomputed, kept, and kept for attention alone.
TEST(RanksMatrix, SharedSequencesAreExchangedAgainOnlyForRecomputation) {
  const auto with = [](const std::string& recompute) {
    return train_shared(shared_model("llama"), false, {"ballast.recompute=" + recompute},
                        &test::joined_ranks());
  };
  const test::Outcome expected = with("true");
  test::expect_same(with("false"), expected, "kept");
  test::expect_same(with("except_attention"), expected, "attention kept");
}

TAG_TESTS("2_ranks,2_ranks_emulated", "RanksMatrix.SharedSequencesLearnNearlyTheSame");
TEST(RanksMatrix, SharedSequencesLearnNearlyTheSame) {
  struct Case {
    std::string model;
    Overrides overrides;
  };
  const std::vector<Case> cases = {
      {shared_gpt2(), {}},
      {shared_gpt2(), {test::kPacked}},
      {shared_model("llama"), {test::kPacked}},
      {shared_model("qwen3"), {}},
      {shared_model("mistral", R"(, "sliding_window": 11)"), {}},
      {shared_model("gpt_oss", R"(, "num_local_experts": 4, "num_experts_per_tok": 2,
                                   "sliding_window": 11)"),
       {test::kPacked}}};
  for (std::size_t i = 0; i < cases.size(); ++i) {
    if (on_cuda() && i != 1 && i + 1 != cases.size()) continue;
    SCOPED_TRACE(cases[i].model);
    const auto& [model, overrides] = cases[i];
    const test::Outcome together = train_shared(model, false, overrides, &test::joined_ranks());
    const test::Outcome alone = train_shared(model, false, overrides, nullptr);
    expect_close(together.losses, alone.losses, 1e-5);
    expect_close(together.evaluations, alone.evaluations, 1e-5);
    expect_close(together.norms, alone.norms, 1e-4);
  }
}

}  // namespace
}  // namespace ballast::engine::ranks_matrix_test
