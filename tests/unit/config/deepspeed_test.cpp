#include <algorithm>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "tests/unit/config/samples.h"

namespace ballast::config::deepspeed_test {
namespace {

using test::error_of;
using test::ignored_paths;
using test::kMinimal;
using test::parse_text;
using test::with;

TEST(DeepSpeedConfig, OfATypicalOffloadRunIsAcceptedAndItsForeignKeysAreListed) {
  const Config c = parse_text(with(R"(
    "zero_optimization": {
      "stage": 3, "overlap_comm": true, "contiguous_gradients": true, "sub_group_size": 1e9,
      "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
      "stage3_param_persistence_threshold": 1e5, "stage3_max_live_parameters": 1e9,
      "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": true,
      "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "pin_memory": true,
                            "buffer_count": 4, "fast_init": false, "pipeline_read": true},
      "offload_param": {"device": "cpu", "buffer_size": 1e8, "max_in_cpu": 1e9}},
    "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": false,
            "overlap_events": true, "intra_op_parallelism": 2, "use_gds": false},
    "fp16": {"enabled": false, "loss_scale": 0, "auto_cast": false}, "bf16": {"enabled": true},
    "activation_checkpointing": {"partition_activations": true, "cpu_checkpointing": true},
    "flops_profiler": {"enabled": true, "profile_step": 1}, "wall_clock_breakdown": false,
    "wandb": {"enabled": true}, "checkpoint": {"tag_validation": "Warn"},
    "zero_allow_untested_optimizer": true, "gradient_allreduce_op": "mean"
  )"));
  EXPECT_EQ(c.zero.stage, 3);
  EXPECT_EQ(c.zero.persistence_threshold, 100'000U);
  EXPECT_EQ(c.zero.optimizer.tier, TierChoice(Tier::nvme));
  EXPECT_EQ(c.zero.optimizer.nvme_path, std::vector<std::filesystem::path>{"/nvme"});
  EXPECT_EQ(c.buffers.state_staging, 4U);
  EXPECT_EQ(c.zero.parameters.tier, TierChoice(Tier::host));
  EXPECT_EQ(c.aio.block_size, 256 * kKiB);
  EXPECT_EQ(c.aio.queue_depth, 32U);
  EXPECT_EQ(c.ballast.activations, TierChoice(Tier::host));
  const auto paths = ignored_paths(c);
  for (const char* path :
       {"zero_optimization.overlap_comm", "zero_optimization.reduce_bucket_size",
        "zero_optimization.offload_optimizer.pin_memory", "aio.intra_op_parallelism",
        "zero_optimization.offload_param.max_in_cpu", "fp16.auto_cast", "flops_profiler",
        "wall_clock_breakdown", "wandb", "checkpoint", "zero_allow_untested_optimizer",
        "activation_checkpointing.partition_activations"}) {
    EXPECT_NE(std::find(paths.begin(), paths.end(), path), paths.end()) << path;
  }
  for (const auto& line : c.ignored) EXPECT_GT(line.size(), line.find(": ") + 12) << line;
}

TEST(DeepSpeedConfig, OffloadDevicesMeanTiers) {
  const auto tier = [](const std::string& device) {
    return parse_text(kMinimal, {"zero_optimization.offload_optimizer.device=" + device})
        .zero.optimizer.tier;
  };
  EXPECT_EQ(tier("none"), TierChoice(Tier::device));
  EXPECT_EQ(tier("cpu"), TierChoice(Tier::host));
  EXPECT_EQ(tier("nvme"), TierChoice(Tier::nvme));
  EXPECT_EQ(tier("auto"), std::nullopt);
}

TEST(DeepSpeedConfig, EveryStageIsAccepted) {
  for (int stage = 0; stage <= 3; ++stage) {
    EXPECT_EQ(parse_text(kMinimal, {"zero_optimization.stage=" + std::to_string(stage)}).zero.stage,
              stage);
  }
}

TEST(DeepSpeedConfig, PersistenceThresholdHasTwoNamesAndAuto) {
  const auto threshold = [](const std::string& setting) {
    return parse_text(kMinimal, {"zero_optimization." + setting}).zero.persistence_threshold;
  };
  EXPECT_EQ(parse_text(kMinimal).zero.persistence_threshold, 0U);
  EXPECT_EQ(threshold("stage3_param_persistence_threshold=70"), 70U);
  EXPECT_EQ(threshold("param_persistence_threshold=1e5"), 100'000U);
  EXPECT_EQ(threshold("stage3_param_persistence_threshold=auto"), 0U);
  EXPECT_EQ(error_of(with(R"("zero_optimization": {"stage3_param_persistence_threshold": 1,
                                                   "param_persistence_threshold": 1})")),
            "c.json: zero_optimization.param_persistence_threshold: "
            "stage3_param_persistence_threshold, the same setting, is given too; remove one");
}

TEST(DeepSpeedConfig, QuantizedWeightsBelongToStageThree) {
  const std::string on = "zero_optimization.zero_quantized_weights=true";
  EXPECT_FALSE(parse_text(kMinimal).zero.quantized_weights);
  EXPECT_TRUE(parse_text(kMinimal, {on, "zero_optimization.stage=3"}).zero.quantized_weights);
  EXPECT_EQ(error_of(with(R"("zero_optimization": {"stage": 2, "zero_quantized_weights": true})")),
            "c.json: zero_optimization.zero_quantized_weights: applies only to the gathers of "
            "stage 3, but the stage is 2; set stage to 3 or this to false");
}

TEST(DeepSpeedConfig, GroupsThatShareWeightsBelongToStageThree) {
  const auto size = [](int stage, int group) {
    const auto set = [](const char* key, int value) {
      return "zero_optimization." + std::string(key) + "=" + std::to_string(value);
    };
    return parse_text(kMinimal, {set("stage", stage), set("zero_hpz_partition_size", group)})
        .zero.hpz_partition_size;
  };
  EXPECT_EQ(parse_text(kMinimal).zero.hpz_partition_size, 1U);
  EXPECT_EQ(size(3, 8), 8U);
  EXPECT_EQ(size(2, 1), 1U);
  EXPECT_EQ(error_of(with(R"("zero_optimization": {"stage": 2, "zero_hpz_partition_size": 8})")),
            "c.json: zero_optimization.zero_hpz_partition_size: applies only to stage 3, but the "
            "stage is 2; set stage to 3 or this to 1");
}

TEST(DeepSpeedConfig, NullMeansTheDefault) {
  const Config c = parse_text(with(
      R"("zero_optimization": {"offload_param": null, "zenflow": null}, "steps_per_print": null)"));
  EXPECT_EQ(c.zero.parameters.tier, TierChoice(Tier::device));
  EXPECT_EQ(c.steps_per_print, 1U);
}

TEST(DeepSpeedConfig, KeysThatChangeResultsAreRefused) {
  const std::pair<const char*, const char*> cases[] = {
      {"fp16.fp16_master_weights_and_grads=true", "master weights are always fp32"},
      {"optimizer.params.amsgrad=true", "AMSGrad is not in Ballast"},
      {"optimizer.params.bias_correction=false", "Adam without bias correction"},
      {"optimizer.params.max_grad_norm=1", "use gradient_clipping"},
      {"bf16.bf16_master_weights_and_grads=true", "master weights are always fp32"},
      {"bf16.bf16_optimizer_states=true", "use ballast.optimizer_states instead"},
      {"zero_optimization.zero_quantized_gradients=true", "gradients are not quantised"},
      {"zero_optimization.zenflow={}", "stale updates are not in Ballast"},
      {"gradient_allreduce_op=sum", "gradients are averaged"},
      {"torch_autocast.enabled=true", "is not in Ballast"},
      {"fp8={\"enabled\": true}", "is a key of other programs, which train in FP8"},
      {"data_efficiency={\"enabled\": true}", "would change training results"},
      {"weight_quantization={}", "would change training results"},
      {"expert_parallel={\"enabled\": true}", "give ballast.expert_parallel"},
      {"tensor_parallel={\"autotp_size\": 2}", "2 does not divide the 1 rank of this run"},
      {"tensor_parallel={\"tp\": {\"tp_size\": 2}}", "give tensor_parallel.autotp_size"},
      {"sequence_parallel_size=4", "4 does not divide the 1 rank of this run"},
      {"optimizer.params.maximize=true", "the loss is minimised"},
      {"optimizer.params.amsgrad=1", "expected true or false, got 1"}};
  for (const auto& [override_text, part] : cases) {
    const std::string message = error_of(kMinimal, {override_text});
    EXPECT_NE(message.find(part), std::string::npos) << override_text << ": " << message;
    EXPECT_NE(message.find("(--set "), std::string::npos) << message;
  }
}

TEST(DeepSpeedConfig, DisabledSectionsAreAccepted) {
  EXPECT_EQ(error_of(kMinimal, {"fp16.enabled=false", "optimizer.params.amsgrad=false",
                                "optimizer.params.adam_w_mode=true", "torch_autocast.enabled=false",
                                "fp8.enabled=false", "bf16.bf16_optimizer_states=false",
                                "data_efficiency={\"enabled\": false, \"params\": {}}",
                                "weight_quantization={\"enabled\": false, \"group_size\": 8}",
                                "expert_parallel={\"enabled\": false, \"autoep_size\": 8}",
                                "zero_optimization.zero_quantized_weights=false"}),
            "");
}

TEST(DeepSpeedConfig, Fp16HasTheDefaultsOfDeepSpeed) {
  const Config c = parse_text(with(R"("fp16": {"enabled": true})"));
  EXPECT_EQ(c.type, DType::f16);
  EXPECT_EQ(c.fp16.loss_scale, 0.0);
  EXPECT_EQ(c.fp16.initial_scale(), 65536.0);
  EXPECT_EQ(c.fp16.loss_scale_window, 1000U);
  EXPECT_EQ(c.fp16.hysteresis, 2U);
  EXPECT_FALSE(c.fp16.consecutive_hysteresis);
  EXPECT_EQ(c.fp16.min_loss_scale, 1.0);
  EXPECT_TRUE(c.ignored.empty());
  EXPECT_EQ(parse_text(print(c)).type, DType::f16);
  EXPECT_EQ(parse_text(with(R"("fp16": {"enabled": false})")).type, DType::bf16);
  EXPECT_EQ(parse_text(with(R"("fp16": {"enabled": false}, "bf16": {"enabled": false})")).type,
            DType::f32);
}

TEST(DeepSpeedConfig, Fp16IsRefusedWhereItDoesNotFit) {
  const std::pair<const char*, const char*> cases[] = {
      {R"("fp16": {"enabled": true}, "bf16": {"enabled": true})",
       "c.json: fp16.enabled: bf16.enabled is true, too; set one of them to false"},
      {R"("fp16": {"enabled": true, "min_loss_scale": 8, "initial_scale_power": 2})",
       "c.json: fp16.min_loss_scale: 8 is above the first scale, 2 to the power of "
       "initial_scale_power 2; lower it or raise that"},
      {R"("fp16": {"enabled": true}, "gradient_clipping": 0, "ballast": {"update": "eager"})",
       "c.json: ballast.update: \"eager\" cannot skip a step, which a dynamic loss scale needs; "
       "use \"gated\", or set fp16.loss_scale to a constant"},
      {R"("fp16": {"enabled": true, "hysteresis": 0})",
       "c.json: fp16.hysteresis: must be at least 1, got 0"},
      {R"("fp16": {"enabled": true, "initial_scale_power": 64})",
       "c.json: fp16.initial_scale_power: must be at most 63, got 64"}};
  for (const auto& [keys, message] : cases) EXPECT_EQ(error_of(with(keys)), message);
  EXPECT_EQ(error_of(with(R"("fp16": {"enabled": true, "loss_scale": 128}, "gradient_clipping": 0,
                             "ballast": {"update": "eager"})")),
            "");
}

TEST(DeepSpeedConfig, DeprecatedCpuOffloadIsMapped) {
  const Config c = parse_text(with(
      R"("optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 2, "cpu_offload": true,
         "cpu_offload_param": false, "cpu_offload_use_pin_memory": true})"));
  EXPECT_EQ(c.zero.optimizer.tier, TierChoice(Tier::host));
  EXPECT_EQ(c.zero.parameters.tier, TierChoice(Tier::device));
  EXPECT_EQ(test::paths_of(c.notes),
            (std::vector<std::string>{"zero_optimization.cpu_offload",
                                      "zero_optimization.cpu_offload_param",
                                      "zero_optimization.cpu_offload_use_pin_memory"}));
  EXPECT_EQ(
      error_of(with(R"("zero_optimization": {"cpu_offload": true, "offload_optimizer": {}})")),
      "c.json: zero_optimization.cpu_offload: deprecated, and 'offload_optimizer' is given "
      "too; remove it");
  EXPECT_EQ(error_of(with(R"("zero_optimization": {"cpu_offload": 1})")),
            "c.json: zero_optimization.cpu_offload: expected true or false, got 1");
  EXPECT_EQ(parse_text(with(R"("bfloat16": {"enabled": false})")).type, DType::f32);
  for (const char* name : {"cpu_offload_param", "cpu_offload_params"}) {
    const std::string zero = fmt::format(R"("zero_optimization": {{"{}": true}})", name);
    EXPECT_EQ(parse_text(with(zero)).zero.parameters.tier, TierChoice(Tier::host)) << name;
  }
  EXPECT_EQ(parse_text(with(R"("zero_optimization": true, "allgather_size": 5e8)")).zero.stage, 1);
  EXPECT_EQ(parse_text(with(R"("zero_optimization": false)")).zero.stage, 0);
}

TEST(DeepSpeedConfig, CpuCheckpointingMeansActivationsOnHost) {
  const std::string theirs = "activation_checkpointing.cpu_checkpointing=true";
  const TierChoice host = Tier::host;
  EXPECT_EQ(parse_text(kMinimal, {theirs}).ballast.activations, host);
  EXPECT_EQ(parse_text(kMinimal, {theirs, "ballast.activations=host"}).ballast.activations, host);
  EXPECT_NE(error_of(kMinimal, {theirs, "ballast.activations=nvme"})
                .find("is true, but ballast.activations, the same setting, is \"nvme\""),
            std::string::npos);
}

/// The triplet in DeepSpeed's order; 0 stands for a missing key.
struct Triplet {
  std::uint64_t train, micro, accumulation, world;
};

std::string batch_text(const Triplet& t) {
  const auto key = [](const char* name, std::uint64_t value) {
    return value == 0 ? std::string() : ", \"" + std::string(name) + "\": " + std::to_string(value);
  };
  return R"({"model": {"hidden_size": 64, "num_layers": 2, "num_heads": 4},
             "data": {"text": "x", "sequence_length": 8})" +
         key("train_batch_size", t.train) + key("train_micro_batch_size_per_gpu", t.micro) +
         key("gradient_accumulation_steps", t.accumulation) + "}";
}

TEST(BatchTriplet, IsDerivedFromWhatIsGiven) {
  const std::pair<Triplet, std::array<std::uint64_t, 3>> cases[] = {
      {{48, 4, 3, 4}, {48, 4, 3}},
      {{48, 4, 0, 4}, {48, 4, 3}},
      {{48, 0, 3, 4}, {48, 4, 3}},
      {{0, 4, 3, 4}, {48, 4, 3}},
      {{48, 0, 0, 4}, {48, 12, 1}},
      {{0, 4, 0, 4}, {16, 4, 1}},
      {{1, 0, 0, 1}, {1, 1, 1}},
      {{6, 2, 0, 1}, {6, 2, 3}},
      // One rank of an unknown number.
      {{48, 4, 3, 0}, {12, 4, 3}},
      {{48, 0, 3, 0}, {48, 16, 3}}};
  for (const auto& [given, expected] : cases) {
    const auto batch = parse_text(batch_text(given), {}, given.world).batch;
    EXPECT_EQ((std::array{batch.train_batch, batch.micro_batch, batch.accumulation}), expected)
        << batch_text(given);
  }
}

TEST(BatchTriplet, IsRefusedWithTheNumbersWhenItDoesNotMultiply) {
  EXPECT_EQ(error_of(batch_text({10, 4, 2, 1})),
            "c.json: train_batch_size: 10 is not train_micro_batch_size_per_gpu 4 x "
            "gradient_accumulation_steps 2 x 1 rank = 8; leave one of them out");
  EXPECT_EQ(error_of(batch_text({10, 4, 0, 1})),
            "c.json: train_batch_size: 10 is not divisible by train_micro_batch_size_per_gpu 4 x 1 "
            "rank");
  EXPECT_EQ(error_of(batch_text({10, 0, 3, 2}), {}, 2),
            "c.json: train_batch_size: 10 is not divisible by gradient_accumulation_steps 3 x 2 "
            "ranks");
  EXPECT_EQ(error_of(batch_text({3, 0, 0, 4}), {}, 4),
            "c.json: train_batch_size: 3 is not divisible by gradient_accumulation_steps 1 x 4 "
            "ranks");
  const std::string missing =
      "c.json: train_batch_size: missing; give it, train_micro_batch_size_per_gpu or both";
  EXPECT_EQ(error_of(batch_text({0, 0, 0, 1})), missing);
  EXPECT_EQ(error_of(batch_text({0, 0, 5, 1})), missing);
  EXPECT_NE(error_of(batch_text({0, 1ULL << 32U, 1ULL << 32U, 1})).find("is too large"),
            std::string::npos);
}

TEST(BatchTriplet, IsDividedByThePlannerIfAutoLeavesAChoice) {
  const std::string automatic = R"("train_micro_batch_size_per_gpu": "auto")";
  const auto batch = parse_text(with(automatic)).batch;
  EXPECT_TRUE(batch.automatic);
  EXPECT_EQ(batch.train_batch, 8U);
  EXPECT_EQ(batch.micro_batch * batch.accumulation, 8U);
  EXPECT_TRUE(parse_text(with(R"("gradient_accumulation_steps": "auto")")).batch.automatic);
  EXPECT_TRUE(
      parse_text(with(automatic + R"(, "gradient_accumulation_steps": "auto")")).batch.automatic);
}

TEST(BatchTriplet, IsNotDividedByThePlannerIfNothingIsOpen) {
  EXPECT_FALSE(parse_text(kMinimal).batch.automatic);
  const auto named = parse_text(with(R"("train_micro_batch_size_per_gpu": "auto",
                                        "gradient_accumulation_steps": 4)"))
                         .batch;
  EXPECT_FALSE(named.automatic);
  EXPECT_EQ(named.micro_batch, 2U);
  const auto whole = parse_text(batch_text({0, 2, 0, 1}), {"gradient_accumulation_steps=auto"});
  EXPECT_FALSE(whole.batch.automatic);
  EXPECT_EQ(whole.batch.accumulation, 1U);
}

}  // namespace
}  // namespace ballast::config::deepspeed_test
