#include "ballast/calibrate/calibrate.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/core/machine.h"
#include "ballast/setup/translate.h"

#include "src/calibrate/calibration.h"
#include "tests/support/captured_log.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"

namespace ballast::calibrate::calibrate_test {
namespace {

const std::string kModel =
    R"("vocab_size": 131, "hidden_size": 32, "num_layers": 2, "num_heads": 2)";
const std::string kOnNvme = "zero_optimization.offload_optimizer.device=nvme";
const std::string kAuto = "zero_optimization.offload_optimizer.device=auto";

class CalibrationTest : public testing::Test {
 protected:
  config::Config config(const std::vector<std::string>& overrides, bool bf16 = true) const {
    return test::tiny_config(kModel, bf16, directory_.path(), overrides);
  }
  static plan::Rates rates_of(const config::Config& config) {
    return calibrate(setup::translate(config)).rates;
  }
  static std::string key_of(const config::Config& config) {
    return calibration_key(setup::translate(config));
  }

  test::TempDir directory_;
};

std::vector<double> tokens(const plan::Curve& curve) {
  std::vector<double> found;
  for (const auto& point : curve) found.push_back(point.tokens);
  return found;
}

TEST_F(CalibrationTest, FindsEveryRateOfARun) {
  for (const bool bf16 : {true, false}) {
    const plan::Rates rates = rates_of(config({kOnNvme, "train_micro_batch_size_per_gpu=3"}, bf16));
    const std::vector<double> sizes = {37, 74, 111, 148};
    for (const auto* curve : {&rates.forward, &rates.backward, &rates.head}) {
      // Slow measurements are skipped on a busy machine.
      const std::vector<double> found = tokens(*curve);
      ASSERT_FALSE(found.empty());
      EXPECT_EQ(found.front(), sizes.front());
      EXPECT_TRUE(std::includes(sizes.begin(), sizes.end(), found.begin(), found.end()));
      for (const auto& point : *curve) EXPECT_GT(point.flops_per_second, 0.0);
    }
    for (const double rate :
         {rates.device_memory_per_second, rates.launch_seconds, rates.update_per_second,
          rates.upload_per_second, rates.offload_per_second, rates.read_per_second,
          rates.write_per_second, rates.mixed_per_second, rates.io_latency_seconds}) {
      EXPECT_GT(rate, 0.0);
      EXPECT_LT(rate, 1e15);
    }
    EXPECT_EQ(rates.shared_cores, static_cast<unsigned>(usable_cpus()));
    EXPECT_GT(rates.compute_threads, 0U);
    EXPECT_GT(rates.update_threads, 0U);
    // 0 on a busy machine, where they cannot be measured.
    for (const double speed :
         {rates.compute_beside_copy, rates.compute_beside_io, rates.update_beside_io,
          rates.io_beside_compute, rates.io_beside_update}) {
      EXPECT_GE(speed, 0.0);
      EXPECT_LE(speed, 1.0);
    }
    EXPECT_GE(rates.mixed_read_share, 0.0);
    EXPECT_LE(rates.mixed_read_share, 1.0);
    EXPECT_GT(rates.spread, 0.0);
    EXPECT_TRUE(std::filesystem::is_empty(directory_.path()));
  }
}

/// Layers of such a family may all be dense, be dense in part, or have one expert.
TEST_F(CalibrationTest, TheSampleOfAFamilyWithExpertsHasDenseLayers) {
  const std::string experts =
      R"("vocab_size": 131, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "num_experts": 4,
         "num_experts_per_tok": 2, "moe_intermediate_size": 24, "intermediate_size": 40)";
  const std::string shared = R"(, "family": "qwen2_moe", "shared_expert_intermediate_size": 8)";
  const std::string own = R"(, "family": "qwen3_moe", "head_dim": 16)";
  const std::vector<std::pair<std::string, std::uint64_t>> widths = {
      {shared + R"(, "mlp_only_layers": [0, 1])", 40}, {own + R"(, "mlp_only_layers": [1, 0])", 40},
      {own + R"(, "decoder_sparse_step": 3)", 40},     {own + R"(, "mlp_only_layers": [0])", 48},
      {own + R"(, "decoder_sparse_step": 2)", 48},     {shared, 56}};
  for (const auto& [keys, width] : widths) {
    const config::Config config =
        test::tiny_config(experts + keys, true, directory_.path(), {kAuto});
    const engine::RunInputs run = setup::translate(config);
    const Sample sample = make_sample(run);
    EXPECT_EQ(sample.blueprint.model.blocks.size(), 4U) << keys;
    EXPECT_EQ(sample.blueprint.model.config.intermediate_size, width) << keys;
    EXPECT_EQ(sample.blueprint.problem.index->routing_bytes(), 0U) << keys;
  }
}

TEST_F(CalibrationTest, TakesThreadsAndLinkFromTheConfigAndLeavesUnusedPathsAlone) {
  const plan::Rates rates = rates_of(
      config({"ballast.compute_threads=1", "ballast.update_threads=3", "ballast.link_gbps=0.01",
              "ballast.out=\"/nowhere/at/all\"", "pipeline.stages=2"}));
  EXPECT_EQ(rates.read_per_second, 0.0);
  EXPECT_EQ(rates.compute_threads, 1U);
  EXPECT_EQ(rates.update_threads, 3U);
  EXPECT_LE(rates.upload_per_second, 0.01e9);
  EXPECT_LE(rates.offload_per_second, 0.01e9);
  EXPECT_EQ(rates.peer_per_second, rates.upload_per_second);
  EXPECT_LT(rates.link_cores, 1.0);
}

TEST_F(CalibrationTest, MeasuresOnlyUnknownRates) {
  CalibrationStart start = {.busy = true};
  start.known.forward = {{37.0, 5e9}};
  start.known.upload_per_second = 6e9;
  const config::Config asked = config({kOnNvme});
  const Calibration found = calibrate(setup::translate(asked), nullptr, start);
  EXPECT_EQ(found.rates.forward, start.known.forward);
  EXPECT_EQ(found.rates.upload_per_second, 6e9);
  EXPECT_EQ(found.rates.offload_per_second, 0.0);
  EXPECT_GT(found.rates.update_per_second, 0.0);
  EXPECT_GT(found.rates.read_per_second, 0.0);
}

TEST_F(CalibrationTest, CopiesEveryRateWithItsPart) {
  const config::Config asked = config({kOnNvme});
  plan::Rates all = calibrate(setup::translate(asked), nullptr, {.busy = true}).rates;
  plan::Rates copy = {.name = all.name};
  for (const CalibrationPart part : kParts) {
    EXPECT_FALSE(has_part(copy, part));
    copy_part(part, all, copy);
    EXPECT_TRUE(has_part(copy, part));
  }
  all.compute_beside_copy = all.compute_beside_io = all.update_beside_io = 0.0;
  all.io_beside_compute = all.io_beside_update = all.other_work = 0.0;
  all.spread = 0.0;
  EXPECT_EQ(copy, all);
}

TEST_F(CalibrationTest, MeasuresOneLayerOfAModelWithListsOfLayers) {
  const plan::Rates rates =
      rates_of(config({"model.family=smollm3", "model.no_rope_layers=[1, 0]",
                       R"(model.layer_types=["full_attention", "sliding_attention"])",
                       "model.sliding_window=9", "model.use_sliding_window=true"}));
  EXPECT_FALSE(rates.forward.empty());
}

/// Layers that share keys and values, and that read rows of tables.
TEST_F(CalibrationTest, MeasuresEachKindOfLayer) {
  const std::string links =
      R"("family": "gemma4", "vocab_size": 131, "hidden_size": 48, "num_layers": 4,
         "num_heads": 4, "num_kv_heads": 2, "head_dim": 12, "global_head_dim": 16,
         "intermediate_size": 64, "sliding_window": 9,
         "layer_types": ["sliding_attention", "full_attention",
                         "sliding_attention", "full_attention"],
         "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 10,
         "vocab_size_per_layer_input": 131)";
  const config::Config asked = test::tiny_config(links, true, directory_.path(), {kAuto});
  const Calibration found = calibrate(setup::translate(asked));
  for (const CalibrationPart part : kParts) EXPECT_TRUE(has_part(found.rates, part));
  EXPECT_FALSE(found.rates.backward.empty());
}

TEST_F(CalibrationTest, MeasuresNoBackwardPassOfLayersThatHaveNone) {
  const config::Config asked = config({R"(ballast.train=["transformer.ln_f.*"])"});
  const plan::Rates rates = calibrate(setup::translate(asked)).rates;
  EXPECT_FALSE(rates.forward.empty());
  EXPECT_TRUE(rates.backward.empty());
  EXPECT_FALSE(rates.head.empty());
}

TEST_F(CalibrationTest, MeasuresDrivesOnlyIfTheRunMayUseThem) {
  EXPECT_FALSE(setup::translate(config({})).constraints.may_swap());
  EXPECT_TRUE(setup::translate(config({kOnNvme})).constraints.may_swap());
  EXPECT_TRUE(setup::translate(config({kAuto})).constraints.may_swap());
  EXPECT_TRUE(
      setup::translate(config({R"(ballast.placement=[{"blocks": "1-1", "optimizer": "nvme"}])"}))
          .constraints.may_swap());
}

TEST_F(CalibrationTest, RefusesAPathThatIsNeededAndMissing) {
  // Only the last folder of a path is made.
  const std::string path = "zero_optimization.offload_optimizer.nvme_path=\"/nowhere/swap\"";
  try {
    rates_of(config({kOnNvme, path}));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::io);
    EXPECT_NE(std::string(error.what()).find("/nowhere"), std::string::npos);
  }
  const test::CapturedLog log;
  EXPECT_EQ(rates_of(config({kAuto, path})).read_per_second, 0.0);
  EXPECT_NE(log.text().find("/nowhere"), std::string::npos) << log.text();
}

TEST_F(CalibrationTest, HasAKeyForWhatChangesTheRates) {
  const std::string key = key_of(config({kOnNvme}));
  EXPECT_EQ(key_of(config({kOnNvme})), key);
  EXPECT_EQ(key_of(config({kOnNvme, "ballast.steps=7", "optimizer.params.lr=0.5"})), key);
  // `plan` and `train` have different run directories.
  const std::string elsewhere = (directory_.path() / "more" / "run").string();
  EXPECT_EQ(key_of(config({kOnNvme, "ballast.out=" + elsewhere})), key);
  for (const char* change :
       {"bf16.enabled=false", "ballast.link_gbps=1", "ballast.compute_threads=7",
        "ballast.update_threads=7", "ballast.update_isa=scalar", "ballast.optimizer_states=8bit",
        "ballast.attention=own", "model.hidden_size=64", "model.vocab_size=132",
        "model.num_layers=3", R"(ballast.train=["transformer.h.1.*"])", "data.sequence_length=36",
        "train_micro_batch_size_per_gpu=4", "aio.queue_depth=3", "aio.buffered=true",
        "zero_optimization.offload_optimizer.nvme_path=/elsewhere",
        "zero_optimization.offload_optimizer.device=cpu"}) {
    EXPECT_NE(key_of(config({kOnNvme, change})), key) << change;
  }
}

TEST_F(CalibrationTest, HasAKeyForEachPart) {
  const auto changed = [&](const char* change) {
    std::vector<CalibrationPart> parts;
    for (const CalibrationPart part : kParts) {
      const config::Config before = config({kOnNvme});
      const config::Config after = config({kOnNvme, change});
      if (part_key(part, setup::translate(before)) != part_key(part, setup::translate(after))) {
        parts.push_back(part);
      }
    }
    return parts;
  };
  using Parts = std::vector<CalibrationPart>;
  EXPECT_EQ(changed("ballast.steps=7"), Parts{});
  EXPECT_EQ(changed("train_micro_batch_size_per_gpu=4"), Parts{CalibrationPart::compute});
  EXPECT_EQ(changed("ballast.update_threads=7"), Parts{CalibrationPart::update});
  EXPECT_EQ(changed("ballast.link_gbps=1"), Parts{CalibrationPart::link});
  EXPECT_EQ(changed("aio.queue_depth=3"), Parts{CalibrationPart::swap});
  EXPECT_EQ(changed("model.hidden_size=64"), Parts(kParts.begin(), kParts.end()));
}

TEST(MeasuredTime, CountTheCallsAfterTheFirst) {
  int calls = 0;
  int prepared = 0;
  const double seconds =
      measured_time(
          {}, {.seconds = 0.0, .least = 3, .most = 5}, [&] { ++calls; }, [&] { ++prepared; })
          .seconds;
  EXPECT_EQ(calls, 4);
  EXPECT_EQ(prepared, 3);
  EXPECT_GT(seconds, 0.0);
  calls = 0;
  measured_time({}, {.seconds = 1e9, .least = 1, .most = 5}, [&] { ++calls; });
  EXPECT_EQ(calls, 6);
  // On a busy machine, a few CPU times are enough, but not a few times of a drive.
  calls = 0;
  measured_time({.cpus = 0.0, .busy = true}, {.seconds = 1e9, .most = 9}, [&] { ++calls; });
  EXPECT_EQ(calls, 10);
  calls = 0;
  measured_time({.cpus = 1.0, .busy = true}, {.seconds = 1e9, .most = 9}, [&] { ++calls; });
  EXPECT_EQ(calls, 6);
}

TEST_F(CalibrationTest, MeasuresLongSequencesShorter) {
  const auto length_of = [&](const std::string& length) {
    const config::Config asked = config({"data.sequence_length=" + length});
    const engine::RunInputs run = setup::translate(asked);
    return measurable_length(make_sample(run));
  };
  EXPECT_EQ(length_of("37"), 37U);
  // Its attention alone takes 10^15 operations.
  EXPECT_LT(length_of("4000000"), 1000000U);
  EXPECT_GE(length_of("4000000"), 128U);
}

TEST_F(CalibrationTest, StopsWhenInterrupted) {
  const std::atomic<bool> interrupted = true;
  const config::Config asked = config({kOnNvme});
  try {
    calibrate(setup::translate(asked), &interrupted);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::interrupted);
  }
  EXPECT_TRUE(std::filesystem::is_empty(directory_.path()));
}

TEST_F(CalibrationTest, UsesTheNumberOfColdBuffersOfTheModel) {
  const config::Config tiny = config({});
  const engine::RunInputs run = setup::translate(tiny);
  const Sample sample = make_sample(run);
  EXPECT_EQ(sample.blueprint.model.blocks.size(), 4U);
  EXPECT_EQ(cold_copies(sample, 1), 4U);
  EXPECT_EQ(cold_copies(sample, 100 * kGiB), 1U);
}

}  // namespace
}  // namespace ballast::calibrate::calibrate_test
