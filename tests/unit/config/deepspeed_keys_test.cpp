#include <algorithm>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "ballast/text/json.h"

#include "tests/unit/config/samples.h"

// Values of DeepSpeed's keys that real configs have, the keys that DeepSpeed 0.19.8 refuses or has
// new, and its defaults.

namespace ballast::config::deepspeed_keys_test {
namespace {

using test::error_of;
using test::ignored_paths;
using test::kMinimal;
using test::parse_text;
using test::with;

TEST(DeepSpeedKeys, ASectionThatIsOffMayHaveAnyOtherValues) {
  const char* const sections[] = {
      R"("tensorboard": {"enabled": false, "output_path": "", "job_name": ""})",
      R"("csv_monitor": {"enabled": false, "output_path": 5, "job_name": "/abs", "x": {}})",
      R"("fp16": {"enabled": false, "loss_scale": -1, "hysteresis": 0, "opt_level": "O2",
                  "fp16_master_weights_and_grads": true, "initial_scale_power": "auto"})",
      R"("bf16": {"enabled": false, "bf16_optimizer_states": true, "loss_scale": []})",
      R"("wandb": {"enabled": false, "team": 3})",
      R"("comet": {"enabled": false, "x": 1})",
      R"("flops_profiler": {"enabled": false, "profile_step": -1})",
      R"("autotuning": {"enabled": false, "fast": 0})"};
  for (const char* section : sections) EXPECT_EQ(error_of(with(section)), "") << section;
  const Config c = parse_text(with(R"("fp16": {"enabled": false, "hysteresis": 0, "z": 1,
                                               "loss_scale_window": 7})"));
  EXPECT_EQ(c.fp16.hysteresis, 2U);
  EXPECT_EQ(c.fp16.loss_scale_window, 7U);
  EXPECT_EQ(ignored_paths(c), (std::vector<std::string>{"fp16.hysteresis", "fp16.z"}));
  EXPECT_EQ(error_of(with(R"("tensorboard": {"enabled": true, "job_name": ""})")),
            "c.json: tensorboard.job_name: expected the name of a folder in output_path");
  EXPECT_NE(error_of(with(R"("csv_monitor": {"job_nam": "x"})")).find("unknown key"),
            std::string::npos);
}

TEST(DeepSpeedKeys, KeysThatItRefusesAreRefusedByNameWhateverTheirValue) {
  const std::pair<const char*, const char*> keys[] = {
      {"nebula", "Nebula"},
      {"compression_training", "compression"},
      {"amp", "Apex"},
      {"quantize_training", "quantization"},
      {"eigenvalue", "quantization"},
      {"sparse_gradients", "embedding gradients"},
      {"sparse_attention", "sparse attention"},
      {"elasticity", "elastic training"},
      {"graph_harvesting", "graph harvesting"},
      {"curriculum_learning", "curriculum"},
      {"progressive_layer_drop", "dropping"},
      {"zero_optimization.mics_shard_size", "MiCS"},
      {"zero_optimization.zeropp_loco_param", "LoCo"}};
  for (const auto& [key, reason] : keys) {
    for (const char* value : {"false", "8", "{\"enabled\": false}"}) {
      const std::string setting = fmt::format("{}={}", key, value);
      const std::string message = error_of(kMinimal, {setting});
      const std::string start = fmt::format(
          "c.json: {} (--set {}): DeepSpeed 0.19.8 refuses this key, because it no longer has ",
          key, setting);
      EXPECT_EQ(message.substr(0, start.size()), start);
      EXPECT_NE(message.find(reason), std::string::npos) << message;
      EXPECT_NE(message.find("; remove "), std::string::npos) << message;
    }
    EXPECT_EQ(error_of(kMinimal, {fmt::format("{}=null", key)}), "") << key;
  }
}

TEST(DeepSpeedKeys, ParallelSizesOfOneAreAccepted) {
  for (const char* setting :
       {"tensor_parallel={\"autotp_size\": 1, \"tp\": {\"tp_size\": 1}, \"dtype\": \"bf16\"}",
        "tensor_parallel={}", "tensor_parallel={\"autotp_size\": 0}", "sequence_parallel_size=1",
        "sequence_parallel_size=0"}) {
    EXPECT_EQ(error_of(kMinimal, {setting}), "") << setting;
  }
  EXPECT_NE(error_of(kMinimal, {"tensor_parallel={\"autotp_size\": -1}"}).find("at least 0"),
            std::string::npos);
}

TEST(DeepSpeedKeys, NewKeysAreKnown) {
  const Config c = parse_text(with(
      R"("zero_optimization": {"stage": 1, "compute_grad_norm": true, "parameter_alignment": true},
         "disable_python_gc": true, "seq_parallel_communication_data_type": "fp32",
         "data_types": {"keep_in_fp32_modules": "auto"},
         "compile": {"passes": ["z3"], "autoep_non_moe": true})"));
  EXPECT_EQ(ignored_paths(c).size(), 6U);
}

TEST(DeepSpeedKeys, AnInfiniteNumberOfStepsMeansNoProgressLines) {
  EXPECT_EQ(parse_text(with(R"("steps_per_print": Infinity)")).steps_per_print, kNoProgressLines);
  for (const char* value : {"Infinity", "inf"}) {
    EXPECT_EQ(parse_text(kMinimal, {fmt::format("steps_per_print={}", value)}).steps_per_print,
              kNoProgressLines);
  }
  const std::string printed = print(parse_text(with(R"("steps_per_print": Infinity)")));
  EXPECT_EQ(parse_text(printed).steps_per_print, kNoProgressLines);
  const std::pair<const char*, const char*> elsewhere[] = {
      {R"("steps_per_print": NaN)", "steps_per_print: expected a whole number, got NaN"},
      {R"("steps_per_print": -Infinity)",
       "steps_per_print: expected a whole number, got -Infinity"},
      {R"("gradient_clipping": Infinity)",
       "gradient_clipping: expected a finite number, got Infinity"},
      {R"("optimizer": {"params": {"betas": [0.9, NaN]}})",
       "optimizer.params.betas[1]: expected a finite number, got NaN"},
      {R"("ballast": {"steps": Infinity})",
       "ballast.steps: expected a whole number, got Infinity"}};
  for (const auto& [keys, message] : elsewhere) {
    EXPECT_EQ(error_of(with(keys)), std::string("c.json: ") + message);
  }
}

TEST(DeepSpeedKeys, AutoIsTheDefaultWhereDeepSpeedLeavesTheKeyOut) {
  const Config c = parse_text(with(R"("zero_optimization": {"stage": "auto",
      "zero_quantized_gradients": "auto", "zero_hpz_partition_size": "auto",
      "offload_optimizer": {"device": "auto", "nvme_path": "auto", "buffer_count": "auto"}},
      "fp16": {"enabled": "auto", "loss_scale": "auto", "hysteresis": "auto"},
      "tensorboard": {"enabled": "auto"})"));
  EXPECT_EQ(c.zero.stage, 0);
  EXPECT_EQ(c.zero.optimizer.tier, std::nullopt);
  EXPECT_TRUE(c.zero.optimizer.nvme_path.empty());
  EXPECT_EQ(c.fp16.hysteresis, 2U);
  EXPECT_FALSE(c.tensorboard.enabled);
}

TEST(DeepSpeedKeys, WarmingUpForNoStepsIsForTwo) {
  for (const char* steps : {"0", "1"}) {
    const Config c = parse_text(with(fmt::format(
        R"("scheduler": {{"type": "WarmupLR", "params": {{"warmup_num_steps": {}}}}})", steps)));
    const std::string line =
        fmt::format("scheduler.params.warmup_num_steps: {} counts as 2", steps);
    EXPECT_TRUE(std::ranges::any_of(c.notes, [&](const std::string& note) {
      return note.starts_with(line);
    })) << line;
  }
  const std::string optimizer =
      R"("optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}}, )";
  EXPECT_EQ(parse_text(with(optimizer + R"("scheduler": {"params": {}})")).notes,
            std::vector<std::string>());
}

TEST(DeepSpeedKeys, AnotherDefaultOfDeepSpeedIsNotedWhereItMatters) {
  const auto notes = [](const std::string& type, const std::string& more, const char* rate) {
    const std::vector<std::string> overrides = {"optimizer.type=SGD", "scheduler.type=" + type,
                                                "scheduler.params={" + more + "}",
                                                std::string("optimizer.params.lr=") + rate};
    return parse(kMinimal, "/", "c.json", overrides).notes;
  };
  const std::string line =
      "scheduler.params.warmup_max_lr: not given, so it is optimizer.params.lr 0.002; DeepSpeed "
      "would take 0.001";
  const std::string total = R"("total_num_steps": 9)";
  EXPECT_EQ(notes("WarmupDecayLR", total, "2e-3"), std::vector<std::string>{line});
  const std::string before =
      "scheduler.params.warmup_max_lr: not given, so it is optimizer.params.lr 0.002; DeepSpeed "
      "before 0.17.2 would take 0.001";
  EXPECT_EQ(notes("WarmupLR", "", "2e-3"), std::vector<std::string>{before});
  EXPECT_TRUE(notes("WarmupDecayLR", total, "1e-3").empty());
  EXPECT_TRUE(notes("WarmupDecayLR", total + R"(, "warmup_max_lr": 5e-3)", "2e-3").empty());
  EXPECT_TRUE(notes("WarmupCosineLR", total, "2e-3").empty());
  EXPECT_TRUE(notes("constant", "", "2e-3").empty());
}

TEST(DeepSpeedKeys, OtherDefaultsOfItsOptimizersAreNoted) {
  const auto notes = [](const std::string& optimizer) {
    return parse_text(with(R"("optimizer": )" + optimizer)).notes;
  };
  const auto line = [](const char* key, const char* own, const char* theirs) {
    return fmt::format(
        "optimizer.params.{}: not given, so it is {}; DeepSpeed would take {}; give the key to "
        "choose",
        key, own, theirs);
  };
  using Lines = std::vector<std::string>;
  const Lines decay = {line("weight_decay", "0.01", "0")};
  EXPECT_EQ(notes(R"({"type": "AdamW"})"), decay);
  EXPECT_EQ(notes(R"({"type": "Adam", "params": {"lr": 1e-3, "weight_decay": null}})"), decay);
  EXPECT_EQ(notes(R"({"params": {"torch_adam": false}})"), decay);
  const Lines lion = {line("lr", "0.0001", "0.001"), line("betas", "[0.9,0.99]", "[0.9,0.999]")};
  EXPECT_EQ(notes(R"({"type": "Lion"})"), lion);
  for (const char* equal : {R"({"type": "AdamW", "params": {"weight_decay": 0.01}})",
                            R"({"type": "AdamW", "params": {"torch_adam": true}})",
                            R"({"type": "Adam", "params": {"adam_w_mode": false}})",
                            R"({"type": "Adagrad"})", R"({"type": "SGD"})",
                            R"({"type": "Lion", "params": {"lr": 1e-4, "betas": [0.9, 0.99]}})"}) {
    EXPECT_EQ(notes(equal), Lines()) << equal;
  }
  EXPECT_TRUE(
      parse_text(print(parse_text(with(R"("optimizer": {"type": "AdamW"})")))).notes.empty());
}

TEST(WeightDecay, ExcludesTensorsByKeywordOrPattern) {
  const auto printed = [](const std::string& value) {
    const Config c = parse_text(kMinimal, {"ballast.weight_decay_exclude=" + value});
    const auto json = text::parse_json(print(c), "printed");
    EXPECT_EQ(parse_text(print(c)).ballast.weight_decay_exclude, c.ballast.weight_decay_exclude);
    return json.find("ballast")->find("weight_decay_exclude")->compact();
  };
  EXPECT_EQ(printed("none"), "\"none\"");
  EXPECT_EQ(printed("[]"), "\"none\"");
  EXPECT_EQ(printed("transformers"), "\"transformers\"");
  EXPECT_EQ(printed(R"(["transformers", "*wte*"])"), R"(["transformers","*wte*"])");
  EXPECT_EQ(
      error_of(kMinimal, {R"(ballast.weight_decay_exclude=["*ln_f*", "*ln_g*"])"}),
      "c.json: ballast.weight_decay_exclude[1] (--set ballast.weight_decay_exclude=[\"*ln_f*\", "
      "\"*ln_g*\"]): '*ln_g*' matches no tensor of the model");
  EXPECT_NE(error_of(kMinimal, {"ballast.weight_decay_exclude=norms"}).find("expected \"none\", "),
            std::string::npos);
}

}  // namespace
}  // namespace ballast::config::deepspeed_keys_test
