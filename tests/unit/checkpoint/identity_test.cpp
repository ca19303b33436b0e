#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/checkpoint/checkpoints.h"
#include "ballast/setup/setup.h"

#include "src/checkpoint/format.h"
#include "src/checkpoint/writer.h"
#include "src/train/run_checkpoints.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"
#include "tests/support/tiny_training.h"

namespace ballast::checkpoint::checkpoint_identity_test {
namespace {

namespace fs = std::filesystem;
using text::Json;
using Overrides = std::vector<std::string>;

constexpr const char* kPlace = "checkpoint.json";

TEST(CheckpointIdentity, ReadsEverySentenceOfOlderVersions) {
  struct Case {
    const char* sentence;
    model::AdapterConfig adapters;
  };
  for (const auto& [sentence, adapters] :
       {Case{"rank 8, alpha 16, for q_proj, v_proj",
             {.rank = 8, .alpha = 16, .targets = {"v_proj", "q_proj"}}},
        Case{"rank 1, alpha 0.1, for mlp.c_proj",
             {.rank = 1, .alpha = 0.1, .targets = {"mlp.c_proj"}}},
        Case{"rank 2, alpha 1e+20 (rsLoRA) (DoRA), for q_proj",
             {.rank = 2, .alpha = 1e20, .rslora = true, .dora = true, .targets = {"q_proj"}}}}) {
    const Json old = sentence;
    check_adapters("folder", read_adapters(&old, kPlace), adapters);
    model::AdapterConfig other = adapters;
    other.alpha += 1e19;
    test::expect_error(ErrorCategory::data, {"folder", "ballast.adapters.alpha"},
                       [&] { check_adapters("folder", read_adapters(&old, kPlace), other); });
  }
  for (const char* damaged : {"", "rank 8", "rank 8, alpha 16", "rank 8, alpha , for q_proj"}) {
    const Json old = damaged;
    test::expect_error(ErrorCategory::data, {kPlace}, [&] { read_adapters(&old, kPlace); });
  }
}

TEST(CheckpointIdentity, ReadsEveryBaseOfOlderVersions) {
  using Format = model::Quantization::Format;
  const std::vector<std::pair<const char*, model::Quantization>> bases = {
      {"int8", {Format::int8}},
      {"nf4", {Format::nf4}},
      {"nf4 with scales in 8 bits", {Format::nf4, true}}};
  for (const auto& [sentence, base] : bases) {
    for (const auto& [other_sentence, other] : bases) {
      const Json old = other_sentence;
      const auto check = [&, here = base] {
        check_quantization("folder", read_quantization(&old, kPlace), here);
      };
      if (other == base) {
        check();
      } else {
        test::expect_error(ErrorCategory::data, {"folder", "was written with ballast."}, check);
      }
    }
  }
}

TEST(CheckpointIdentity, ComparesOnlyKeysThatChangeTheModel) {
  const model::AdapterConfig before = {.rank = 8, .alpha = 16, .targets = {"q_proj", "v_proj"}};
  const Json stored = text::parse_json(identity_of(before).compact(), kPlace);
  model::AdapterConfig same = before;
  same.targets = {"v_proj", "q_proj"};
  same.dropout = 0.5;
  check_adapters("folder", stored, same);
  const auto refuses = [&](const char* words, auto change) {
    model::AdapterConfig other = before;
    change(other);
    test::expect_error(ErrorCategory::data, {words},
                       [&] { check_adapters("folder", stored, other); });
  };
  refuses("ballast.adapters.rank 8, but the config has 4", [](auto& other) { other.rank = 4; });
  refuses("ballast.adapters.rslora false, but the config has true",
          [](auto& other) { other.rslora = true; });
  refuses("ballast.adapters.dora", [](auto& other) { other.dora = true; });
  refuses("ballast.adapters.targets q_proj, v_proj, but the config has q_proj",
          [](auto& other) { other.targets.pop_back(); });
}

/// Rewrites checkpoint.json as versions without fields wrote it.
void make_old(const fs::path& folder, const char* adapters, const char* base) {
  Json content = read_sealed(facts_file(folder));
  ASSERT_TRUE(content.find("adapters")->is_object());
  ASSERT_TRUE(content.find("quantized_base")->is_object());
  content["adapters"] = adapters;
  content["quantized_base"] = base;
  fs::remove(facts_file(folder));
  std::ofstream(facts_file(folder)) << seal(content);
}

config::Config config_of(const fs::path& run, const Overrides& more = {}) {
  Overrides overrides = {"ballast.checkpoint_every=1",
                         "ballast.steps=3",
                         "ballast.train=adapters",
                         "ballast.quantized_base=nf4",
                         "ballast.double_quantization=true",
                         R"(ballast.adapters={"targets": ["q_proj", "up_proj"], "rank": 2})"};
  overrides.insert(overrides.end(), more.begin(), more.end());
  return test::tiny_config(
      R"("family": "llama", "vocab_size": 131, "hidden_size": 32, "num_layers": 1, "num_heads": 2)",
      true, run, overrides);
}

TEST(CheckpointIdentity, OldCheckpointsResumeAndRefuseOtherAdapters) {
  const test::TempDir directory;
  const fs::path run = directory.path() / "run";
  fs::create_directories(run);
  const config::Config config = config_of(run);
  std::uint64_t hash = 0;
  fs::path folder;
  {
    engine::Engine engine = setup::make_engine(config);
    engine.start();
    engine.train_step(test::scattered_ids(engine.blueprint().problem.tokens_per_step(), 1).view(),
                      0.01);
    hash = engine.snapshot().hash();
    const CheckpointFacts facts = {.step = 1,
                                   .updates = 1,
                                   .batch = config.batch.train_batch,
                                   .length = config.data.sequence_length};
    folder = CheckpointWriter(engine, run, facts, 2, nullptr).publish();
  }
  make_old(folder, "rank 2, alpha 8, for q_proj, up_proj", "nf4 with scales in 8 bits");
  {
    engine::Engine engine = setup::make_engine(config);
    train::resume_run(engine, config, run, nullptr);
    EXPECT_EQ(engine.snapshot().hash(), hash);
  }
  // An exported copy has fields again.
  const fs::path states = directory.path() / "states";
  export_states(run, states, [](Bytes, Bytes) {});
  EXPECT_TRUE(read_sealed(facts_file(states)).find("adapters")->is_object());
  for (const fs::path& from : {run, states}) {
    const auto refuses = [&](const char* words, const std::string& change) {
      const config::Config other = config_of(run, {change});
      engine::Engine engine = setup::make_engine(other);
      test::expect_error(ErrorCategory::data, {words},
                         [&] { train::resume_run(engine, other, from, nullptr); });
    };
    refuses("ballast.adapters.rank 2, but the config has 3", "ballast.adapters.rank=3");
    refuses("ballast.double_quantization true, but the config has false",
            "ballast.double_quantization=false");
  }
}

}  // namespace
}  // namespace ballast::checkpoint::checkpoint_identity_test
