// Predicted steps with the rates of configs/rates, against measured steps and against arithmetic
// for kernels that no GPU has run yet.

#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ballast/calibrate/machine_rates.h"
#include "ballast/config/config.h"
#include "ballast/setup/forecast.h"

#include "tests/support/temp_dir.h"

namespace ballast::setup::planned_figures_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

plan::Rates shipped(const std::string& name) {
  return calibrate::load_rates(std::string(BALLAST_CONFIGS) + "/rates/" + name + ".json");
}

/// The machine on which tools/BENCHMARKS.md was measured: an H200 alone.
plan::Rates measured_h200() {
  plan::Rates rates = shipped("h200-node");
  rates.update_per_second = 131e9;
  rates.upload_per_second = 54.8e9;
  rates.offload_per_second = 54.4e9;
  rates.host_bytes = 128 * kGiB;
  return rates;
}

config::Config run_of(const std::string& model, const std::string& batch,
                      const std::vector<std::string>& overrides) {
  return config::parse(R"({"model": {)" + model + R"(},
    "data": {"tokens": "unused.bin", )" +
                           batch + R"(,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
    "gradient_clipping": 1.0, "zero_optimization": {"stage": 3,
      "offload_optimizer": {"device": "auto"}, "offload_param": {"device": "auto"}}})",
                       "/", "test", overrides);
}

std::string batch(int length, int micro_batch, int accumulation) {
  return R"("sequence_length": )" + std::to_string(length) +
         R"(}, "train_micro_batch_size_per_gpu": )" + std::to_string(micro_batch) +
         R"(, "train_batch_size": )" + std::to_string(micro_batch * accumulation);
}

const std::string kLlama8 = R"("family": "llama", "vocab_size": 128256, "hidden_size": 4096,
    "num_layers": 32, "num_heads": 32, "num_kv_heads": 8, "intermediate_size": 14336,
    "max_sequence": 8192, "tie_embeddings": false)";
const std::vector<std::string> kOnHost = {
    "zero_optimization.offload_optimizer.device=cpu", "zero_optimization.offload_param.device=cpu",
    "ballast.recompute=true", "ballast.speculative_updates=0"};

double seconds(const Forecast& forecast) {
  return forecast.decision.prediction.step_seconds;
}

/// The forecast for a file in configs/ on one rank.
Forecast of_file(const std::string& name, const plan::Rates& rates) {
  return make_forecast(config::load(std::string(BALLAST_CONFIGS) + "/" + name, {}), rates);
}

void expect_between(double value, double least, double most) {
  EXPECT_GT(value, least);
  EXPECT_LT(value, most);
}

TEST(PlannedFigures, MatchMeasuredStepsOf8B) {
  std::vector<std::string> small = kOnHost;
  small.emplace_back("ballast.device_bytes=24GiB");
  plan::Rates rates = measured_h200();
  // 6.90 s, before the backward pass of attention by warpgroups.
  rates.of(AttentionClass::heads_128).backward = 176e12;
  expect_between(seconds(make_forecast(run_of(kLlama8, batch(2048, 4, 8), small), rates)),
                 0.95 * 6.90, 1.05 * 6.90);
  // 4.58 s
  expect_between(
      seconds(make_forecast(run_of(kLlama8, batch(8192, 4, 1), kOnHost), measured_h200())),
      0.9 * 4.58, 1.1 * 4.58);
}

/// The arithmetic for 4 x 32k tokens: 235 to 260 s on an RTX 4090, 75 to 90 s on an H100.
TEST(PlannedFigures, OfDeltaNetsAndHeadsOf256CountTheirKernels) {
  const std::string file = "desktop-qwen3.5-27b.json";
  expect_between(seconds(of_file(file, shipped("rtx4090-1nvme"))), 0.85 * 235.0, 1.15 * 260.0);
  expect_between(seconds(of_file(file, shipped("h100-node"))), 0.85 * 75.0, 1.15 * 90.0);
}

/// 12 layers of Gemma 4's form, 2 of which have heads of 512: about 20 s on an H100.
TEST(PlannedFigures, OfHeadsOf512CountTheirKernelsAndSaySo) {
  const std::string model = R"("family": "gemma4", "vocab_size": 262144, "hidden_size": 5376,
      "num_layers": 12, "num_heads": 32, "num_kv_heads": 16, "head_dim": 256,
      "global_head_dim": 512, "num_global_key_value_heads": 4, "attention_k_eq_v": true,
      "intermediate_size": 21504, "max_sequence": 8192)";
  const Forecast forecast =
      make_forecast(run_of(model, batch(8192, 4, 1), {}), shipped("h100-node"));
  expect_between(seconds(forecast), 0.85 * 20.0, 1.15 * 20.0);
  const auto text = [](const Forecast& described) {
    std::string all;
    for (const std::string& line : describe(described)) all += line + "\n";
    return all;
  };
  EXPECT_THAT(text(forecast), HasSubstr("attention with heads wider than 256 runs on slow"));
  const Forecast narrow =
      make_forecast(run_of(kLlama8, batch(8192, 4, 1), {}), shipped("h100-node"));
  EXPECT_THAT(text(narrow), Not(HasSubstr("note")));
}

/// 4 layers with 128 heads of 192: what attention adds to a step whose heads had 128.
TEST(PlannedFigures, OfLatentAttentionCountTheirKernels) {
  const std::string model = R"("family": "deepseek_v3", "vocab_size": 32000, "hidden_size": 2048,
      "num_layers": 4, "num_heads": 32, "intermediate_size": 8192, "first_k_dense_replace": 4,
      "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
      "v_head_dim": 128, "max_sequence": 8192)";
  const config::Config run = run_of(model, batch(8192, 4, 1), {"ballast.recompute=true"});
  for (const char* name : {"rtx4090-1nvme", "h100-node"}) {
    const plan::Rates rates = shipped(name);
    plan::Rates narrow = rates;
    narrow.of(AttentionClass::heads_192) = rates.of(AttentionClass::heads_128);
    const double attention = 4.0 * 4.0 * 32768.0 * 4096.0 * 32 * 192;  // forward FLOPs
    const auto seconds_of = [&](const plan::AttentionRate& rate) {
      return attention * (2.0 / rate.forward + 2.5 / rate.backward);
    };
    const double more = seconds_of(rates.of(AttentionClass::heads_192)) -
                        seconds_of(rates.of(AttentionClass::heads_128));
    EXPECT_NEAR(seconds(make_forecast(run, rates)) - seconds(make_forecast(run, narrow)), more,
                0.05 * more)
        << name;
  }
}

/// The arithmetic: products of rank 16 take some 11% of a forward pass and 20% of a backward pass.
TEST(PlannedFigures, OfAdaptersCountTheirMemoryTraffic) {
  const config::Config run = run_of(
      kLlama8, batch(2048, 2, 4),
      {"ballast.train=adapters", R"(ballast.adapters={"targets": "all-linear", "rank": 16})"});
  for (const char* name : {"rtx4090-1nvme", "h100-node"}) {
    plan::Rates rates = shipped(name);
    const double now = make_forecast(run, rates).tokens_per_second;
    rates.adapter_per_second = 0.0;
    const double before = make_forecast(run, rates).tokens_per_second;
    expect_between(now / before, 0.77, 0.90);
  }
}

/// A file with attention's two old keys, and nothing for adapters.
TEST(PlannedFigures, OfOldRatesFilesAreNoFasterAndSaySo) {
  const test::TempDir directory;
  plan::Rates old = shipped("rtx4090-1nvme");
  const double now = seconds(of_file("desktop-qwen3.5-27b.json", old));
  for (const AttentionClassInfo& info : kAttentionClasses) {
    if (info.id != AttentionClass::heads_128) old.of(info.id) = {};
  }
  old.adapter_per_second = 0.0;
  const auto file = directory.path() / "old.json";
  calibrate::save_rates(file, old);
  const Forecast forecast = of_file("desktop-qwen3.5-27b.json", calibrate::given_rates(file));
  EXPECT_GE(seconds(forecast), 0.999 * now);
  std::string text;
  for (const std::string& line : describe(forecast)) text += line + " ";
  EXPECT_THAT(text, HasSubstr("no rates of attention with heads of 193"));
  EXPECT_THAT(text, HasSubstr("no rates of recurrences"));
  EXPECT_THAT(text, HasSubstr("no adapter_gbps"));
}

}  // namespace
}  // namespace ballast::setup::planned_figures_test
