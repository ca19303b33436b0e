#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/config/key_effects.h"

#include "tests/unit/config/samples.h"

namespace ballast::config::tensor_parallel_test {
namespace {

using test::error_of;
using test::ignored_paths;
using test::kMinimal;
using test::parse_text;
using test::with;

using Overrides = std::vector<std::string>;

const char* const kLlama =
    R"(model={"family": "llama", "hidden_size": 64, "num_layers": 2, "num_heads": 8,
              "num_kv_heads": 4, "layer_tiles": 4, "vocabulary_tiles": 4})";

/// A Llama of four tiles, shared by `size` ranks.
Overrides shared_by(int size, Overrides more = {}) {
  more.insert(more.begin(), {kLlama, "tensor_parallel.autotp_size=" + std::to_string(size)});
  return more;
}

TEST(ConfigTensorParallel, DividesTheBatchAmongGroupsOfRanks) {
  EXPECT_EQ(parse_text(kMinimal).tensor_parallel, 1U);
  EXPECT_EQ(parse_text(kMinimal, {"tensor_parallel.autotp_size=0"}).tensor_parallel, 1U);
  const Config shared = parse_text(kMinimal, shared_by(2), 8);
  EXPECT_EQ(shared.tensor_parallel, 2U);
  EXPECT_EQ(shared.batch.micro_batch, 2U);
  EXPECT_EQ(shared.batch.train_batch, 8U);
  EXPECT_EQ(parse_text(kMinimal, shared_by(4), 8).batch.micro_batch, 4U);
  EXPECT_EQ(parse_text(print(shared), {}, 8).tensor_parallel, 2U);
  EXPECT_EQ(effects_of("tensor_parallel.autotp_size").on_resume, KeyRole::free);
}

TEST(ConfigTensorParallel, SaysWhatDividesWhat) {
  const auto expect = [](Overrides overrides, std::uint64_t ranks, const std::string& part) {
    const std::string message = error_of(kMinimal, overrides, ranks);
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  const std::string key = "tensor_parallel.autotp_size";
  expect(shared_by(4), 6,
         ": 4 does not divide the 6 ranks of this run; it must divide the heads of keys (4) and "
         "the ranks; possible: 1, 2");
  expect(shared_by(8), 8, ": 8 does not divide the 4 heads of keys");
  expect(shared_by(2, {"model.layer_tiles=3"}), 2,
         "model.layer_tiles (--set model.layer_tiles=3): " + key +
             " 2 does not divide the 3 tiles of an MLP; give a multiple of 2, or \"auto\"");
  expect(shared_by(4, {"model.num_kv_heads=12", "model.num_heads=12", "model.hidden_size=96",
                       "model.layer_tiles=8"}),
         4, "4 does not divide the 6 tiles of attention, which has 12 heads");
  expect(shared_by(2, {"model.vocabulary_tiles=1"}), 2,
         "2 does not divide the 1 tiles of the vocabulary");
  expect(shared_by(2, {"train_batch_size=9"}), 8,
         "9 is not divisible by gradient_accumulation_steps 1 x 4 groups of 2 ranks (" + key + ")");
}

TEST(ConfigTensorParallel, RoundsTheNumbersOfTilesUp) {
  const auto tiles_of = [](const std::string& size, Overrides more) {
    more.insert(more.begin(), {kLlama, "model.layer_tiles=auto", "model.vocabulary_tiles=auto",
                               "tensor_parallel.autotp_size=" + size});
    const model::ModelConfig model = parse_text(kMinimal, more, 0).model;
    return std::vector<std::uint64_t>{model.layer_tiles, model::attention_tiles(model),
                                      model.vocabulary_tiles};
  };
  using Tiles = std::vector<std::uint64_t>;
  EXPECT_EQ(tiles_of("1", {}), (Tiles{1, 1, 1}));
  EXPECT_EQ(tiles_of("4", {}), (Tiles{4, 4, 4}));
  // A large vocabulary has a usual number of tiles, which depends on the tiles of layers.
  const Overrides large = {"model.hidden_size=2048", "model.vocab_size=152000",
                           "model.layer_tiles=4"};
  const std::uint64_t usual = tiles_of("1", large)[2];
  EXPECT_GT(usual, 4U);
  EXPECT_NE(usual % 4, 0U);
  EXPECT_EQ(tiles_of("4", large)[2], (usual / 4 + 1) * 4);
}

TEST(ConfigTensorParallel, IsRefusedForLayersThatAreNotCut) {
  const auto refused = [](Overrides overrides, const std::string& rule) {
    const std::string message = error_of(kMinimal, overrides, 2);
    EXPECT_NE(message.find("tensor_parallel.autotp_size"), std::string::npos) << message;
    EXPECT_NE(message.find(rule), std::string::npos) << message;
  };
  refused(shared_by(2, {"ballast.train=adapters"}), "adapters are not cut");
  refused(shared_by(2, {"ballast.quantized_base=nf4", R"(ballast.train=["*norm*"])"}),
          "ballast.quantized_base are not cut");
  refused(shared_by(2, {R"(data={"pairs": "p.safetensors", "sequence_length": 32})"}),
          "preference pairs are not trained");
  refused(shared_by(2, {"sequence_parallel_size=2"}),
          "sequence and tensor parallelism cannot be combined");
}

TEST(ConfigTensorParallel, PartitionsActivationsOfRanksThatShareLayers) {
  const std::string key = "activation_checkpointing.partition_activations";
  EXPECT_FALSE(parse_text(kMinimal).partition_activations);
  const Config shared = parse_text(kMinimal, shared_by(2, {key + "=true"}), 2);
  EXPECT_TRUE(parse_text(print(shared), {}, 2).partition_activations);
  EXPECT_TRUE(ignored_paths(shared).empty());
  EXPECT_EQ(ignored_paths(parse_text(kMinimal, {key + "=true"})), std::vector<std::string>{key});
  EXPECT_EQ(effects_of(key).on_resume, KeyRole::free);
}

TEST(ConfigTensorParallel, OtherKeysOfTheSectionAreKnown) {
  const Config c = parse_text(with(
      R"("tensor_parallel": {"autotp_size": 1, "tp_overlap_comm": true, "preset_model": "llama",
              "dtype": "bf16", "keep_module_on_host": true, "replace_with_kernel_inject": false})"));
  EXPECT_EQ(ignored_paths(c).size(), 5U);
  for (const char* key : {"partition_config", "injection_policy_tuple"}) {
    EXPECT_NE(error_of(kMinimal, {std::string("tensor_parallel.") + key + "={}"})
                  .find("describes how its layers are cut; remove it"),
              std::string::npos)
        << key;
  }
}

TEST(ConfigTensorParallel, NamesOfOtherProgramsAreCorrected) {
  for (const char* name : {"tp_size", "tensor_model_parallel_size", "tensor_parallel_size",
                           "tensor_parallel.tp_size"}) {
    EXPECT_NE(error_of(kMinimal, {std::string(name) + "=2"}).find("autotp_size'"),
              std::string::npos)
        << name;
  }
}

}  // namespace
}  // namespace ballast::config::tensor_parallel_test
