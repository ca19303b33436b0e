#include <algorithm>
#include <map>

#include <gtest/gtest.h>

#include "tests/unit/config/samples.h"

// Keys and values of configs that DeepSpeed's users copy, from the documentation of transformers
// and accelerate and the examples of LLaMA-Factory, axolotl and DeepSpeedExamples. A run adds the
// sections model and data, and nothing else.

namespace ballast::config::deepspeed_examples_test {
namespace {

using test::error_of;
using test::parse_text;
using test::with;

const std::string kAutoBatch = R"("gradient_accumulation_steps": "auto",
  "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto")";
const std::string kAutoAdamW = R"("optimizer": {"type": "AdamW", "params": {"lr": "auto",
  "betas": "auto", "eps": "auto", "weight_decay": "auto"}})";
const std::string kAutoWarmup = R"("scheduler": {"type": "WarmupLR", "params": {
  "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}})";
const std::string kLossScale = R"("loss_scale": 0, "loss_scale_window": 1000,
  "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1)";
const std::string kAutoFp16 = R"("fp16": {"enabled": "auto", )" + kLossScale + "}";
const std::string kAutoTypes = kAutoFp16 + R"(, "bf16": {"enabled": "auto"})";
const std::string kStage3 = R"("overlap_comm": true, "contiguous_gradients": true,
  "sub_group_size": 1e9, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
  "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
  "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": true)";

const std::map<std::string, std::string> kRuns = {
    {"transformers, ZeRO-2", kAutoTypes + "," + kAutoAdamW + "," + kAutoWarmup + R"(,
       "zero_optimization": {"stage": 2,
         "offload_optimizer": {"device": "cpu", "pin_memory": true},
         "allgather_partitions": true, "allgather_bucket_size": 2e8, "overlap_comm": true,
         "reduce_scatter": true, "reduce_bucket_size": 2e8, "contiguous_gradients": true},
       "gradient_clipping": "auto", "steps_per_print": 2000, "wall_clock_breakdown": false,)" +
                                 kAutoBatch},
    {"transformers, ZeRO-3", kAutoTypes + "," + kAutoAdamW + "," + kAutoWarmup + R"(,
       "zero_optimization": {"stage": 3,
         "offload_optimizer": {"device": "cpu", "pin_memory": true},
         "offload_param": {"device": "cpu", "pin_memory": true},)" +
                                 kStage3 + R"(},
       "gradient_clipping": "auto", "steps_per_print": 2000, "wall_clock_breakdown": false,)" +
                                 kAutoBatch},
    {"transformers, ZeRO-Infinity", kAutoFp16 + "," + kAutoAdamW + "," + kAutoWarmup + R"(,
       "zero_optimization": {"stage": 3,
         "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": true,
           "buffer_count": 4, "fast_init": false},
         "offload_param": {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": true,
           "buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9},
         "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1,
           "single_submit": false, "overlap_events": true},)" +
                                        kStage3 + R"(},
       "gradient_clipping": "auto", "steps_per_print": 2000, "wall_clock_breakdown": false,)" +
                                        kAutoBatch},
    {"accelerate, ZeRO-3 offload", R"("bf16": {"enabled": "auto"}, )" + kAutoAdamW + R"(,
       "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto",
         "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}},
       "zero_optimization": {"stage": 3,
         "offload_optimizer": {"device": "cpu", "pin_memory": true},
         "offload_param": {"device": "cpu", "pin_memory": true}, "overlap_comm": true,
         "contiguous_gradients": true, "reduce_bucket_size": "auto",
         "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
         "sub_group_size": 1e9, "stage3_max_live_parameters": 1e9,
         "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": "auto"},
       "ballast": {"steps": 100},
       "gradient_clipping": "auto", "steps_per_print": 2000, "wall_clock_breakdown": false,)" +
                                       kAutoBatch},
    {"accelerate, ZeRO-2 of its launcher", R"("zero_optimization": {"stage": 2,
         "offload_optimizer": {"device": "none", "nvme_path": null},
         "offload_param": {"device": "none", "nvme_path": null},
         "stage3_gather_16bit_weights_on_model_save": false},
       "gradient_clipping": 1.0, "train_batch_size": "auto",
       "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 1,
       "bf16": {"enabled": true}, "fp16": {"enabled": false},
       "zero_allow_untested_optimizer": true)"},
    {"LLaMA-Factory, ZeRO-2", kAutoBatch + R"(, "gradient_clipping": "auto",
       "zero_allow_untested_optimizer": true, )" +
                                  kAutoTypes + R"(,
       "zero_optimization": {"stage": 2, "allgather_partitions": true,
         "allgather_bucket_size": 5e8, "overlap_comm": false, "reduce_scatter": true,
         "reduce_bucket_size": 5e8, "contiguous_gradients": true,
         "round_robin_gradients": true})"},
    {"LLaMA-Factory, ZeRO-3 offload", kAutoBatch + R"(, "gradient_clipping": "auto",
       "zero_allow_untested_optimizer": true, )" +
                                          kAutoTypes + R"(,
       "zero_optimization": {"stage": 3,
         "offload_optimizer": {"device": "cpu", "pin_memory": true},
         "offload_param": {"device": "cpu", "pin_memory": true},)" +
                                          kStage3 + "}"},
    {"axolotl, ZeRO-2", R"("zero_optimization": {"stage": 2,
         "offload_optimizer": {"device": "cpu"}, "contiguous_gradients": true,
         "overlap_comm": true},
       "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "auto_cast": false, )" +
                            kLossScale + R"(},
       "gradient_clipping": "auto", "wall_clock_breakdown": false,)" +
                            kAutoBatch},
    {"axolotl, ZeRO-3 offload", R"("zero_force_ds_cpu_optimizer": false,
       "zero_allow_untested_optimizer": true,
       "zero_optimization": {"stage": 3,
         "offload_optimizer": {"device": "cpu", "pin_memory": true},
         "offload_param": {"device": "cpu", "pin_memory": true}, "overlap_comm": true,
         "contiguous_gradients": true, "sub_group_size": 0, "reduce_bucket_size": "auto",
         "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
         "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0,
         "gather_16bit_weights_on_model_save": true},
       "bf16": {"enabled": true}, "gradient_clipping": "auto", "wall_clock_breakdown": false,)" +
                                    kAutoBatch}};

std::string completed(const std::string& keys) {
  return R"({"model": {"hidden_size": 64, "num_layers": 2, "num_heads": 4},
             "data": {"text": "corpus.txt", "sequence_length": 32}, )" +
         keys + "}";
}

TEST(DeepSpeedExamples, RunWithModelAndDataAdded) {
  EXPECT_EQ(kRuns.size(), 9U);
  for (const auto& [name, keys] : kRuns) {
    for (const std::uint64_t ranks : {1, 2}) {
      EXPECT_EQ(error_of(completed(keys), {}, ranks), "") << name << ", " << ranks << " ranks";
    }
  }
}

TEST(DeepSpeedExamples, RunInFp16IfTheySaySo) {
  const std::string hello = R"("train_micro_batch_size_per_gpu": 8, "gradient_clipping": 1.0,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-4}}, "fp16": {"enabled": true},
    "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}})";
  EXPECT_EQ(parse_text(completed(hello)).type, DType::f16);
  EXPECT_EQ(parse_text(completed(hello + R"(, "bf16": {"enabled": "auto"})")).type, DType::f16);
}

TEST(DeepSpeedAuto, MeansTheDefaultsOfTransformersAndIsNoted) {
  const Config c = parse_text(completed(kRuns.at("transformers, ZeRO-3")));
  EXPECT_EQ(c.gradient_clipping, 1.0);
  EXPECT_EQ(c.optimizer.lr, 5e-5);
  EXPECT_EQ(c.optimizer.beta2, 0.999);
  EXPECT_EQ(c.optimizer.weight_decay, 0.0);
  EXPECT_EQ(c.type, DType::bf16);
  EXPECT_FALSE(c.scheduler.warmup_max_lr.has_value());
  EXPECT_EQ(c.scheduler.warmup_num_steps, 2U);
  EXPECT_EQ(c.batch.train_batch, 8U);
  EXPECT_TRUE(c.batch.automatic);
  EXPECT_EQ(parse_text(completed(kRuns.at("transformers, ZeRO-3")), {}, 2).batch.train_batch, 16U);
  const auto noted = [&](const std::string& line) {
    return std::find(c.notes.begin(), c.notes.end(), line) != c.notes.end();
  };
  EXPECT_TRUE(noted("optimizer.params.lr: \"auto\" is 5e-05, the default of transformers"));
  EXPECT_TRUE(noted("scheduler.params.warmup_max_lr: \"auto\" is optimizer.params.lr"));
  EXPECT_EQ(parse_text(completed(kRuns.at("accelerate, ZeRO-3 offload"))).scheduler.total_num_steps,
            100U);
}

TEST(DeepSpeedExamples, MayHaveAioInOnePlaceOnly) {
  const std::string inner = R"("zero_optimization": {"aio": {"queue_depth": 7}})";
  EXPECT_EQ(parse_text(with(inner)).aio.queue_depth, 7U);
  EXPECT_NE(error_of(with(inner + R"(, "aio": {"queue_depth": 8})")).find("is given too"),
            std::string::npos);
}

}  // namespace
}  // namespace ballast::config::deepspeed_examples_test
