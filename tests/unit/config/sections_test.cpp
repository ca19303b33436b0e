#include <initializer_list>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include "ballast/model/family.h"

#include "tests/unit/config/samples.h"

namespace ballast::config::sections_test {
namespace {

using test::error_of;
using test::kMinimal;
using test::parse_text;
using test::with;
using Paths = std::vector<std::filesystem::path>;

TEST(ConfigDefaults, AreThoseOfTheHeaderPlusDerivedOnes) {
  const Config c = parse_text(kMinimal);
  EXPECT_EQ(c.model.family, "gpt2");
  EXPECT_EQ(c.model.vocab_size, 256U);
  EXPECT_EQ(c.model.num_kv_heads, 4U);
  EXPECT_EQ(c.model.intermediate_size, 256U);
  EXPECT_EQ(c.model.max_sequence, 32U);
  EXPECT_TRUE(c.model.tie_embeddings);
  EXPECT_EQ(c.model.head_dim, 16U);
  EXPECT_EQ(c.data.held_out, 0.05);
  EXPECT_EQ(c.optimizer.lr, 5e-5);  // of transformers' Trainer
  EXPECT_EQ(c.scheduler.type, SchedulerSection::Type::linear);
  EXPECT_EQ(c.type, DType::bf16);
  EXPECT_EQ(c.gradient_clipping, 1.0);
  EXPECT_EQ(c.zero.optimizer.tier, TierChoice(Tier::device));
  EXPECT_EQ(c.ballast.device_bytes, 0U);
  EXPECT_TRUE(c.ballast.out.empty());
  EXPECT_TRUE(c.ignored.empty());
}

TEST(ConfigDefaults, OfLlamaFollowItsShape) {
  const Config c = parse_text(kMinimal, {"model.family=llama", "model.hidden_size=320"});
  EXPECT_EQ(c.model.intermediate_size, 896U);  // 8/3 x 320 = 853.3, up to a multiple of 64
  EXPECT_FALSE(c.model.tie_embeddings);
  EXPECT_EQ(
      parse_text(kMinimal, {"model.family=llama", "model.hidden_size=96"}).model.intermediate_size,
      256U);  // exactly 8/3 x 96
}

TEST(ConfigTrain, IsAllOrPatternsThatMatch) {
  EXPECT_TRUE(parse_text(kMinimal).ballast.train.empty());
  EXPECT_TRUE(parse_text(kMinimal, {"ballast.train=all"}).ballast.train.empty());
  const Config c = parse_text(kMinimal, {R"(ballast.train=["transformer.h.1.*", "*wpe*"])"});
  EXPECT_EQ(c.ballast.train, (std::vector<std::string>{"transformer.h.1.*", "*wpe*"}));
  const auto says = [](const std::string& value, const std::string& key, const std::string& rule) {
    const std::string error = error_of(kMinimal, {"ballast.train=" + value});
    EXPECT_NE(error.find(key + " (--set"), std::string::npos) << error;
    EXPECT_NE(error.find("): " + rule), std::string::npos) << error;
  };
  says("some", "ballast.train", "expected \"all\", \"adapters\" or an array of patterns");
  says("[]", "ballast.train", "names no tensor");
  says("[7]", "ballast.train[0]", "expected a string");
  says(R"(["*", "transformer.g.1.*"])", "ballast.train[1]",
       "'transformer.g.1.*' matches no tensor of the model (did you mean 'transformer.h.1.*'?)");
}

TEST(ConfigAdapters, HaveTheDefaultsOfPeftAndNeedTrainAdapters) {
  const Config c =
      parse_text(kMinimal, {"ballast.train=adapters", "ballast.adapters.targets=c_attn"});
  ASSERT_TRUE(c.ballast.adapters.has_value());
  EXPECT_EQ(c.ballast.adapters->rank, 8U);
  EXPECT_EQ(c.ballast.adapters->alpha, 8.0);
  EXPECT_EQ(c.ballast.adapters->dropout, 0.0);
  EXPECT_FALSE(c.ballast.adapters->rslora);
  EXPECT_EQ(c.ballast.adapters->targets, std::vector<std::string>{"c_attn"});
  EXPECT_EQ(c.model.layer_tiles, 1U);
  EXPECT_EQ(print(parse_text(print(c))), print(c));
  const auto says = [](std::vector<std::string> overrides, const std::string& rule) {
    overrides.insert(overrides.begin(), "ballast.train=adapters");
    const std::string error = error_of(kMinimal, overrides);
    EXPECT_NE(error.find(rule), std::string::npos) << error;
    EXPECT_EQ(error.find('\n'), std::string::npos) << error;
  };
  says({},
       "ballast.adapters.targets (--set ballast.train=adapters): missing; give names of linear "
       "maps");
  says({"ballast.adapters.targets=[7]"}, "targets[0] (--set");
  says({"ballast.adapters.targets=c_att"}, "did you mean 'c_attn'?");
  says({"ballast.adapters.rank=0"}, "must be at least 1, got 0");
  says({"ballast.adapters.alpha=0"}, "must be above 0, got 0");
  says({"ballast.adapters.dropout=1"}, "must be at least 0 and below 1");
  says({R"(ballast.adapters={"targets": "c_fc", "dora": true, "dropout": 0.1})"},
       "is true, but dropout is 0.1");
  says({"ballast.adapters.lora_alpha=1"}, "did you mean 'alpha'?");
  says({"ballast.adapters.targets=c_fc", "model.layer_tiles=2"},
       "model.layer_tiles (--set model.layer_tiles=2): is 2, but layers with adapters");
  const std::string error = error_of(kMinimal, {"ballast.adapters.targets=c_fc"});
  EXPECT_NE(error.find("ballast.train is not \"adapters\""), std::string::npos) << error;
}

TEST(ConfigPairs, NeedAdapters) {
  const auto says = [](std::vector<std::string> overrides, const std::string& rule) {
    const std::vector<std::string> pairs = {"data.text=[]", "data.tokens=[]", "data.pairs=[\"p\"]"};
    overrides.insert(overrides.begin(), pairs.begin(), pairs.end());
    const std::string error = error_of(kMinimal, overrides);
    EXPECT_NE(error.find(rule), std::string::npos) << error;
    EXPECT_EQ(error.find('\n'), std::string::npos) << error;
  };
  says({}, "set this to \"adapters\"");
  says({"ballast.train=adapters",
        R"(ballast.adapters={"targets": "c_fc", "modules_to_save": "ln_f"})"},
       "ballast.adapters.modules_to_save");
  says({"data.documents=[\"d\"]"}, "data.documents is given too; give one of them");
  says({"ballast.preference.loss_type=ipo"}, "only \"sigmoid\"");
  says({"ballast.preference.beta=0"}, "must be above 0, got 0");
  says({"ballast.preference.label_smoothing=0.7"}, "label_smoothing");
}

TEST(ConfigQuantizedBase, NeedsFrozenMatrices) {
  const std::vector<std::string> some = {R"(ballast.train=["*ln_1*"])",
                                         "ballast.quantized_base=nf4"};
  const Config c = parse_text(kMinimal, some);
  const auto model = model_of(
      c, [](const std::string& path, const std::string& rule) { FAIL() << path << ": " << rule; });
  ASSERT_TRUE(model.quantization.has_value());
  EXPECT_EQ(model.quantization->description(), "nf4");
  std::size_t quantized = 0;
  for (const model::BlockSpec& block : model.blocks) {
    for (const model::TensorSpec& tensor : block.tensors) quantized += tensor.quantized ? 1 : 0;
  }
  EXPECT_EQ(quantized, 4 * c.model.num_layers);  // c_attn, c_proj, c_fc, c_proj
  const auto says = [](const std::vector<std::string>& overrides, const std::string& rule) {
    const std::string error = error_of(kMinimal, overrides);
    EXPECT_NE(error.find(rule), std::string::npos) << error;
    EXPECT_EQ(error.find('\n'), std::string::npos) << error;
  };
  says({"ballast.quantized_base=nf4"},
       "there are no frozen matrices to quantise; set ballast.train");
  says({some[0], "ballast.quantized_base=nf5"}, "did you mean 'nf4'?");
  says({some[0], "ballast.quantized_base=int8", "ballast.double_quantization=true"},
       "is for the scales of \"nf4\", but ballast.quantized_base is \"int8\"");
  says({R"(ballast.train=["*norm*"])", some[1], "model.family=llama", "model.layer_tiles=2"},
       "set model.layer_tiles to 1");
}

TEST(ConfigPaths, AreAbsoluteAndKeepTheirGlobs) {
  const Config c =
      parse_text(kMinimal, {"data.text=[\"../src/**/*.cpp\", \"./a b\", \"/abs\", \"~/x\"]",
                            "model.weights=w.safetensors", "ballast.out=/run/x/../y",
                            "zero_optimization.offload_param.nvme_path=swap"});
  EXPECT_EQ(c.data.text,
            (std::vector<std::string>{"/src/**/*.cpp", "/base/a b", "/abs", "/base/~/x"}));
  EXPECT_EQ(c.initial_weights, "/base/w.safetensors");
  EXPECT_EQ(c.ballast.out, "/run/y");
  EXPECT_EQ(c.zero.parameters.nvme_path, (Paths{"/base/swap"}));
  EXPECT_TRUE(parse_text(kMinimal, {"ballast.out="}).ballast.out.empty());
}

TEST(ConfigSizes, AreNumbersOrStringsWithUnitsOrAuto) {
  const auto bytes = [](const std::string& value) {
    return parse_text(kMinimal, {"ballast.host_bytes=" + value}).ballast.host_bytes;
  };
  EXPECT_EQ(bytes("1000"), 1000U);
  EXPECT_EQ(bytes("3GiB"), 3 * kGiB);
  EXPECT_EQ(bytes("\"1.5 KiB\""), 1536U);
  EXPECT_EQ(bytes("1e9"), 1000000000U);
  EXPECT_EQ(bytes("auto"), 0U);
}

TEST(ConfigSchedules, ReadTheirParameters) {
  const Config decay = parse_text(with(
      R"("scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 50,
         "warmup_num_steps": 5, "warmup_min_lr": 0.1, "warmup_max_lr": 0.2,
         "warmup_type": "linear", "last_batch_iteration": -1}})"));
  EXPECT_EQ(decay.scheduler.type, SchedulerSection::Type::warmup_decay);
  EXPECT_EQ(decay.scheduler.total_num_steps, 50U);
  EXPECT_EQ(decay.scheduler.warmup_num_steps, 5U);
  EXPECT_EQ(decay.scheduler.warmup_min_lr, 0.1);
  EXPECT_EQ(decay.scheduler.warmup_max_lr, std::optional(0.2));
  EXPECT_TRUE(decay.scheduler.warmup_linear);
  // The parameters may precede the type that gives them their meaning.
  const Config cosine = parse_text(with(
      R"("scheduler": {"params": {"total_num_steps": 9, "warmup_min_ratio": 0.5,
         "cos_min_ratio": 0.25}, "type": "WarmupCosineLR"})"));
  EXPECT_EQ(cosine.scheduler.type, SchedulerSection::Type::warmup_cosine);
  EXPECT_EQ(cosine.scheduler.warmup_min_ratio, 0.5);
  EXPECT_EQ(cosine.scheduler.cos_min_ratio, 0.25);
  EXPECT_FALSE(cosine.scheduler.warmup_linear);
}

TEST(ConfigPlacement, ReadsRulesInOrder) {
  const Config c = parse_text(with(R"("ballast": {"placement": [
      {"blocks": "all", "weights": "host", "optimizer": "nvme"},
      {"blocks": "1-2", "weights": "cpu"}, {"blocks": 3, "optimizer": "device"}]})"));
  ASSERT_EQ(c.ballast.placement.size(), 3U);
  const auto& all = c.ballast.placement[0];
  EXPECT_EQ(all.first_block, 0U);
  EXPECT_EQ(all.last_block, 3U);  // embedding, two layers, head
  EXPECT_EQ(all.weights, std::optional(Tier::host));
  EXPECT_EQ(all.optimizer, std::optional(Tier::nvme));
  EXPECT_EQ(c.ballast.placement[1].first_block, 1U);
  EXPECT_EQ(c.ballast.placement[1].last_block, 2U);
  EXPECT_EQ(c.ballast.placement[1].weights, std::optional(Tier::host));
  EXPECT_EQ(c.ballast.placement[1].optimizer, std::nullopt);
  EXPECT_EQ(c.ballast.placement[2].first_block, 3U);
  EXPECT_EQ(c.ballast.placement[2].last_block, 3U);
}

/// One override of the minimal config and the whole message after "c.json: PATH (--set ...): ".
struct Refusal {
  const char* path;
  const char* value;
  std::string message;
};

class ConfigRefusal : public testing::TestWithParam<Refusal> {};

TEST_P(ConfigRefusal, NamesThePathAndWhatIsWrong) {
  const auto& [path, value, message] = GetParam();
  const std::string override_text = std::string(path) + "=" + value;
  EXPECT_EQ(error_of(kMinimal, {override_text}),
            "c.json: " + std::string(path) + " (--set " + override_text + "): " + message);
}

INSTANTIATE_TEST_SUITE_P(
    Types, ConfigRefusal,
    testing::Values(
        Refusal{"train_batch_size", "eight", "expected a whole number, got the string \"eight\""},
        Refusal{"train_batch_size", "1.5", "expected a whole number, got 1.5"},
        Refusal{"train_batch_size", "true", "expected a whole number, got true"},
        Refusal{"train_batch_size", "[8]", "expected a whole number, got an array"},
        Refusal{"gradient_clipping", "\"1\"", "expected a number, got the string \"1\""},
        Refusal{"bf16.enabled", "1", "expected true or false, got 1"},
        Refusal{"bf16", "true", "expected an object, got true"},
        Refusal{"data.text", "5", "expected a path or an array of paths, got 5"},
        Refusal{"data.token_type", "2", "expected one of auto, u16, u32, got 2"},
        Refusal{"ballast.out", "12", "expected a string, got 12"},
        Refusal{"ballast.host_bytes", "lots",
                "expected a size (a number of bytes, or a number with B, kB, MB, GB, TB, KiB, MiB, "
                "GiB or TiB), got the string \"lots\""},
        Refusal{"optimizer.params.betas", "0.9", "expected an array of two numbers, got 0.9"},
        Refusal{"optimizer.params.betas", "[0.9]", "expected two numbers, got 1"},
        Refusal{"ballast.placement", "all", "expected an array of rules, got the string \"all\""}));

INSTANTIATE_TEST_SUITE_P(
    Ranges, ConfigRefusal,
    testing::Values(
        Refusal{"train_batch_size", "0", "must be at least 1, got 0"},
        Refusal{"train_batch_size", "-8", "must be at least 1, got -8"},
        Refusal{"train_batch_size", "1e300", "must be at most 4294967296, got 1e300"},
        Refusal{"optimizer.params.lr", "0", "must be above 0, got 0"},
        Refusal{"optimizer.params.lr", "-1e-3", "must be above 0, got -1e-3"},
        Refusal{"optimizer.params.eps", "0", "must be above 0, got 0"},
        Refusal{"optimizer.params.weight_decay", "-0.1", "must be at least 0, got -0.1"},
        Refusal{"gradient_clipping", "-1", "must be at least 0, got -1"},
        Refusal{"data.eval", "true",
                "expected a share of the data, a path or an array of paths, got true"},
        Refusal{"data.eval", "0.6", "must be at least 0 and at most 0.5, got 0.6"},
        Refusal{"data.held_out", "0.51", "must be at least 0 and at most 0.5, got 0.51"},
        Refusal{"data.sequence_length", "0", "must be at least 1, got 0"},
        Refusal{"model.vocabulary_tiles", "0", "must be at least 1, got 0"},
        Refusal{"model.layer_tiles", "0", "must be at least 1, got 0"},
        Refusal{"zero_optimization.stage", "4", "must be at most 3, got 4"},
        Refusal{"aio.queue_depth", "0", "must be at least 1, got 0"},
        Refusal{"aio.block_size", "5000", "must be a multiple of 4 KiB (4096), got 5000"},
        Refusal{"aio.block_size", "512", "must be at least 4096, got 512"},
        Refusal{"ballast.device_bytes", "0", "must be at least 1, got 0"},
        Refusal{"ballast.compute_threads", "-1", "must be at least 0, got -1"},
        Refusal{"ballast.update_numa_node", "-1", "must be at least 0, got -1"},
        Refusal{"ballast.update_numa_node", "1.5", "expected a whole number, got 1.5"},
        Refusal{"ballast.steps", "-1", "must be at least 0, got -1"},
        Refusal{"ballast.link_gbps", "-2", "must be at least 0, got -2"}));

INSTANTIATE_TEST_SUITE_P(
    Choices, ConfigRefusal,
    testing::Values(
        Refusal{"model.family", "lama",
                fmt::format("expected one of {}, got the string \"lama\" (did you mean 'llama'?)",
                            fmt::join(model::family_names(), ", "))},
        Refusal{"ballast.update", "eager",
                "\"eager\" updates a block before the norm of all gradients is known, but "
                "gradient_clipping is 1; set it to 0 or use \"gated\""},
        Refusal{"ballast.attention", "cudn",
                "expected one of auto, own, cudnn, got the string \"cudn\" (did you mean "
                "'cudnn'?)"},
        Refusal{"ballast.kernels", "own", "expected one of auto, plain, got the string \"own\""},
        Refusal{"ballast.gpu_checks", "true", "expected one of off, each, got true"},
        Refusal{"ballast.product_algorithms", "time",
                "expected one of auto, heuristic, timed, got the string \"time\" (did you mean "
                "'timed'?)"},
        Refusal{"ballast.update", "x", "expected one of gated, eager, got the string \"x\""},
        Refusal{"scheduler.type", "WarmupLr",
                "expected one of constant, linear, WarmupLR, WarmupDecayLR, WarmupCosineLR, got "
                "the string "
                "\"WarmupLr\" (did you mean 'WarmupLR'?)"},
        Refusal{"optimizer.type", "Lamb",
                "\"Lamb\" is not in Ballast; use one of " + test::optimizer_titles()},
        Refusal{"optimizer.type", "FusedAdam", "\"FusedAdam\" is called AdamW in Ballast"},
        Refusal{"optimizer.type", "3", "expected one of " + test::optimizer_titles() + ", got 3"},
        Refusal{"ballast.optimizer_states", "8-bit",
                "expected one of fp32, bf16_first, 8bit, got the string \"8-bit\" (did you mean "
                "'8bit'?)"},
        Refusal{"zero_optimization.offload_param.device", "disk",
                "expected one of none, cpu, nvme, auto, got the string \"disk\""}));

INSTANTIATE_TEST_SUITE_P(
    Auto, ConfigRefusal,
    testing::Values(
        Refusal{"ballast.link_gbps", "auto", "\"auto\" is not accepted here; expected a number"},
        Refusal{"ballast.serial", "auto", "\"auto\" is not accepted here; expected true or false"},
        Refusal{"ballast.steps", "auto", "\"auto\" is not accepted here; expected a whole number"},
        Refusal{"ballast.out", "auto", "\"auto\" is not accepted here; expected a string"},
        Refusal{"aio.block_size", "auto",
                "\"auto\" is not accepted here; expected a size (a number of bytes, or a number "
                "with B, kB, MB, GB, TB, KiB, MiB, GiB or TiB)"},
        Refusal{"ballast.update", "auto",
                "\"auto\" is not accepted here; expected one of gated, eager"}));

INSTANTIATE_TEST_SUITE_P(
    CrossChecks, ConfigRefusal,
    testing::Values(
        Refusal{"data.tokens", "a.bin", "data.text is given too; give one of them"},
        Refusal{"data.documents", "a", "data.text is given too; give one of them"},
        Refusal{"model.vocab_size", "255",
                "must be at least 256 for data.text, which is read byte by byte, got 255"},
        Refusal{"model.max_sequence", "16", "16 is shorter than data.sequence_length 32"},
        Refusal{"model.num_heads", "5", "5 does not divide hidden_size 64"},
        Refusal{"model.vocab_size", "2147483648", "must be at most 2147483647, got 2147483648"},
        Refusal{"model.num_kv_heads", "3", "3 does not divide num_heads 4"},
        Refusal{"model.num_kv_heads", "2", "gpt2 needs the value of num_heads (4), got 2"}));

INSTANTIATE_TEST_SUITE_P(Keys, ConfigRefusal,
                         testing::Values(Refusal{"zero_optimization.offload_optimzer", "1",
                                                 "unknown key (did you mean 'offload_optimizer'?)"},
                                         Refusal{"gradient_clipp1ng", "1",
                                                 "unknown key (did you mean 'gradient_clipping'?)"},
                                         Refusal{"model.num_hidden_layers", "1",
                                                 "unknown key (did you mean 'num_layers'?)"},
                                         Refusal{"data.seq_len", "1",
                                                 "unknown key (did you mean 'sequence_length'?)"},
                                         Refusal{"quux", "1", "unknown key"}));

TEST(ConfigRefusal, OfUnknownKeysCoversEveryLevel) {
  for (const char* path :
       {"", "model.", "data.", "optimizer.", "optimizer.params.", "scheduler.", "scheduler.params.",
        "bf16.", "fp16.", "zero_optimization.", "zero_optimization.offload_optimizer.",
        "zero_optimization.offload_param.", "aio.", "activation_checkpointing.", "tensorboard.",
        "csv_monitor.", "ballast."}) {
    const std::string key = std::string(path) + "qqqqqqqq";
    EXPECT_EQ(error_of(kMinimal, {key + "=1"}),
              "c.json: " + key + " (--set " + key + "=1): unknown key");
  }
  EXPECT_EQ(error_of(with(R"("ballast": {"placement": [{"blocks": 1, "weight": "host"}]})")),
            "c.json: ballast.placement[0].weight: unknown key (did you mean 'weights'?)");
}

TEST(ConfigRefusal, OfBetasNamesTheElement) {
  EXPECT_EQ(error_of(with(R"("optimizer": {"params": {"betas": [0.9, 1]}})")),
            "c.json: optimizer.params.betas[1]: must be at least 0 and below 1, got 1");
}

TEST(ConfigRefusal, OfPlacementRules) {
  const auto message = [](const std::string& rule) {
    return error_of(with("\"ballast\": {\"placement\": [" + rule + "]}"));
  };
  EXPECT_EQ(message(R"({"weights": "host"})"),
            "c.json: ballast.placement[0]: lacks \"blocks\"; add it");
  EXPECT_EQ(message(R"({"blocks": 1})"),
            "c.json: ballast.placement[0]: has no effect; add \"weights\", \"optimizer\", "
            "\"activations\", \"gradients\" or \"recompute\"");
  EXPECT_EQ(message(R"({"blocks": "3-1", "weights": "host"})"),
            "c.json: ballast.placement[0].blocks: the range 3-1 ends before it starts");
  EXPECT_EQ(message(R"({"blocks": "0-4", "weights": "host"})"),
            "c.json: ballast.placement[0].blocks: there is no block 4; the model has blocks 0 "
            "(embedding) to 3 (head)");
  for (const char* blocks : {"\"\"", "\"-\"", "\"1-\"", "\"-1\"", "\"1 - 2\"", "\"x\"", "\"1-2-3\"",
                             "\"99999999999999999999\"", "[1]"}) {
    EXPECT_NE(message(std::string(R"({"weights": "host", "blocks": )") + blocks + "}")
                  .find("blocks: expected a block number, a range such as \"0-3\" or \"all\", got"),
              std::string::npos)
        << blocks;
  }
}

TEST(ConfigLayerTiles, AreANumberOrFollowFromTheShape) {
  const auto tiles = [](std::initializer_list<std::string> overrides) {
    std::vector<std::string> all = {"model.family=llama", "model.intermediate_size=100"};
    all.insert(all.end(), overrides);
    return parse_text(kMinimal, all).model.layer_tiles;
  };
  EXPECT_EQ(tiles({}), 1U);
  EXPECT_EQ(tiles({"model.layer_tiles=auto"}), 1U);
  EXPECT_EQ(tiles({"model.layer_tiles=7"}), 7U);
  // Layers of 2^31 elements. A model with more layers has fewer tiles per layer.
  const std::string width = "model.hidden_size=16384";
  const std::string wide = "model.intermediate_size=21846";
  EXPECT_EQ(tiles({width, wide}), 43U);
  EXPECT_EQ(tiles({width, wide, "model.num_layers=64"}), 8U);
  EXPECT_EQ(tiles({width, wide, "model.family=gemma3"}), 1U);  // cannot be cut
}

TEST(ConfigLayerTiles, AreRefusedWithTheReasonIfLayersCannotBeCut) {
  EXPECT_EQ(error_of(kMinimal, {"model.family=gemma3", "model.layer_tiles=2"}),
            "c.json: model.layer_tiles (--set model.layer_tiles=2): layers of this gemma3 model "
            "cannot be cut into tiles, because they have norms after attention or the MLP; set it "
            "to 1");
}

TEST(ConfigLayerTiles, HaveAtLeastOneStepEach) {
  EXPECT_EQ(error_of(kMinimal,
                     {"model.family=llama", "model.intermediate_size=100", "model.layer_tiles=8"}),
            "c.json: model.layer_tiles (--set model.layer_tiles=8): intermediate_size 100 allows "
            "at most 7 tiles of 16, got 8");
}

TEST(ConfigRefusal, OfMissingKeysSaysWhatToGive) {
  EXPECT_EQ(error_of("{}"),
            "c.json: data.sequence_length: missing; give the number of tokens per sequence");
  EXPECT_EQ(error_of(kMinimal, {"model.hidden_size=null"}),
            "c.json: model.hidden_size (--set model.hidden_size=null): missing; give the width of "
            "the model");
  EXPECT_EQ(
      error_of(R"({"data": {"sequence_length": 8}})"),
      "c.json: data: no training data; give data.text, data.tokens, data.documents or data.pairs");
  EXPECT_EQ(error_of(with(R"("scheduler": {"type": "WarmupDecayLR"})")),
            "c.json: scheduler.params.total_num_steps: missing; give the step at which the "
            "schedule ends");
}

TEST(ConfigRefusal, OfScheduleParametersOfAnotherSchedule) {
  EXPECT_EQ(
      error_of(with(R"("scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 5}})")),
      "c.json: scheduler.params.total_num_steps: is not a parameter of the schedule "
      "\"WarmupLR\"");
  EXPECT_EQ(error_of(with(R"("scheduler": {"params": {"warmup_num_steps": 5}})")),
            "c.json: scheduler.params.warmup_num_steps: is not a parameter of the schedule "
            "\"constant\"");
}

TEST(ConfigRefusal, OfTokensThatDoNotFitTheirType) {
  const std::string text = R"({"model": {"vocab_size": 65537, "hidden_size": 64, "num_layers": 2,
      "num_heads": 4}, "data": {"tokens": "a.bin", "sequence_length": 8}, "train_batch_size": 1})";
  EXPECT_EQ(error_of(text, {"data.token_type=u16"}),
            "c.json: data.token_type (--set data.token_type=u16): u16 holds 65536 tokens, but "
            "model.vocab_size is 65537; use "
            "u32");
  EXPECT_EQ(error_of(text, {"data.token_type=u32"}), "");
  EXPECT_EQ(error_of(text), "");
  EXPECT_EQ(error_of(text, {"model.vocab_size=65536", "data.token_type=u16"}), "");
}

TEST(ConfigData, OfEvaluationIsFilesOrAShare) {
  const auto files = parse_text(kMinimal, {"data.eval=[\"a\", \"/b\"]"});
  EXPECT_EQ(files.data.eval, (std::vector<std::string>{"/base/a", "/b"}));
  EXPECT_EQ(files.data.held_out, 0.0);
  EXPECT_EQ(files.data.evaluation().text, files.data.eval);
  EXPECT_EQ(parse_text(kMinimal, {"data.eval=a", "data.held_out=0"}).data.held_out, 0.0);
  const auto share = parse_text(kMinimal, {"data.eval=0.25"});
  EXPECT_TRUE(share.data.eval.empty());
  EXPECT_EQ(share.data.held_out, 0.25);
  EXPECT_EQ(parse_text(kMinimal, {"data.eval=[]"}).data.held_out, 0.05);
  const auto documents =
      parse_text(kMinimal, {"data.text=[]", "data.documents=d", "data.eval=[\"e\", \"f\"]"});
  const auto printed = parse_text(print(documents));
  EXPECT_EQ(printed.data.documents, (std::vector<std::string>{"/base/d"}));
  EXPECT_EQ(printed.data.eval, (std::vector<std::string>{"/base/e", "/base/f"}));
  EXPECT_EQ(printed.data.evaluation().documents, printed.data.eval);
}

TEST(ConfigRefusal, OfEvaluationDataGivenTwice) {
  EXPECT_NE(error_of(kMinimal, {"data.eval=a", "data.held_out=0.1"})
                .find("data.eval names files for evaluation; give one of them"),
            std::string::npos);
  EXPECT_NE(error_of(kMinimal, {"data.eval=0.2", "data.held_out=0.1"})
                .find("data.held_out=0.1): data.eval gives a share too; give one of them"),
            std::string::npos);
}

TEST(ConfigRefusal, OfATimeoutThatIsNone) {
  for (const std::string value : {"0", "-1", "1e7", "\"auto\""}) {
    EXPECT_NE(error_of(kMinimal, {"ballast.comm_timeout_seconds=" + value})
                  .find("ballast.comm_timeout_seconds"),
              std::string::npos)
        << value;
  }
  EXPECT_EQ(parse_text(kMinimal, {"ballast.comm_timeout_seconds=0.5"}).ballast.comm_timeout_seconds,
            0.5);
}

TEST(ConfigRefusal, ShowsHostileKeysAndStringsInOneLine) {
  EXPECT_EQ(error_of(R"({"qqqq\nqqqq": 1})"), "c.json: qqqq\\u000aqqqq: unknown key");
  const std::string message = error_of("{\"" + std::string(100000, 'x') + "\": 1}");
  EXPECT_LT(message.size(), 1000U);
  EXPECT_LT(error_of(kMinimal, {"model.family=" + std::string(100000, 'y')}).size(), 1000U);
  EXPECT_NE(error_of(kMinimal, {"ballast.out=\"a\\u0000b\""}).find("zero byte"), std::string::npos);
}

}  // namespace
}  // namespace ballast::config::sections_test
