#include <cstdint>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include "src/train/run_inputs.h"
#include "tests/support/captured_log.h"
#include "tests/support/documents_file.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"

namespace ballast::train::run_doubts_test {
namespace {

class RunDoubts : public testing::Test {
 protected:
  /// A run on 4000 bytes of text, or on the data that `overrides` name.
  config::Config config(std::vector<std::string> overrides) const {
    overrides.insert(overrides.begin(), {"ballast.steps=10", "data.held_out=0"});
    config::Config config = test::tiny_config(
        R"("vocab_size": 256, "hidden_size": 32, "num_layers": 1, "num_heads": 2)", false,
        directory_.path() / "run", overrides);
    if (config.data.documents.empty()) {
      config.data.tokens.clear();
      config.data.text = {text_};
    }
    return config;
  }
  static std::vector<std::string> doubts(const config::Config& config) {
    return find_doubts(config, data::open_training_data(config));
  }
  /// Expects one doubt with these words.
  void expect(const std::vector<std::string>& overrides, const std::vector<std::string>& words) {
    expect_of(config(overrides), words);
  }
  static void expect_of(const config::Config& config, const std::vector<std::string>& words) {
    const std::vector<std::string> lines = doubts(config);
    ASSERT_EQ(lines.size(), 1U) << fmt::format("{}", fmt::join(lines, "\n"));
    for (const std::string& word : words) {
      EXPECT_NE(lines.front().find(word), std::string::npos) << lines.front();
    }
    EXPECT_EQ(lines.front().find('\n'), std::string::npos);
  }
  /// Documents of these lengths; returns the override that trains on them.
  std::string documents(const std::vector<std::size_t>& lengths) const {
    std::vector<std::vector<std::uint16_t>> all;
    for (const std::size_t length : lengths) all.emplace_back(length, std::uint16_t{7});
    const auto file = directory_.write("documents.safetensors", test::documents_of(all));
    return fmt::format(R"(data={{"documents": ["{}"], "sequence_length": 128, "held_out": 0}})",
                       file.string());
  }

  test::TempDir directory_;
  std::string text_ = directory_.write("text.txt", std::string(4000, 'a') + "bcd").string();
};

TEST_F(RunDoubts, UsualSettingsRaiseNone) {
  EXPECT_EQ(doubts(config({})), std::vector<std::string>());
  EXPECT_EQ(doubts(config({"scheduler.type=WarmupCosineLR", "scheduler.params.warmup_num_steps=2",
                           "scheduler.params.total_num_steps=10"})),
            std::vector<std::string>());
  EXPECT_EQ(doubts(config({documents(std::vector<std::size_t>(20, 120))})),
            std::vector<std::string>());
}

TEST_F(RunDoubts, UnusualSettings) {
  expect({"optimizer.params.lr=1000"}, {"optimizer.params.lr is 1000"});
  expect({"optimizer.params.weight_decay=2"}, {"optimizer.params.weight_decay is 2"});
  expect({"scheduler.type=WarmupLR"},
         {"scheduler.params.warmup_num_steps is 1000, but the run has 10 steps"});
  expect({"scheduler.type=WarmupDecayLR", "scheduler.params.warmup_num_steps=2",
          "scheduler.params.total_num_steps=5"},
         {"scheduler.params.total_num_steps is 5, but the run has 10 steps", "in the last 5"});
  expect({"model.vocab_size=50257"}, {"model.vocab_size is 50257", "set model.vocab_size to 256"});
  expect({"data.eval=" + text_}, {"data.eval: ", text_, "is a file of data.text, too"});
}

TEST_F(RunDoubts, ABatchThatRepeatsItsSequences) {
  expect({"data.sequence_length=1000"},
         {"train_batch_size is 6, but data.text has 3 sequences of 1000 tokens", "to 3 or less"});
  // All documents in one sequence, and a batch of 6 of it.
  expect({documents({60, 60})},
         {"train_batch_size is 6, but data.documents has 1 sequence of 128 tokens"});
}

TEST_F(RunDoubts, PaddingThatAnotherLengthAvoids) {
  // Two of them do not fit into a sequence, and no shorter one can contain the longest.
  const auto lines =
      doubts(config({documents(std::vector<std::size_t>(12, 65)), "data.sequence_length=128"}));
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_NE(lines.front().find("49% of the tokens of data.documents are padding"),
            std::string::npos)
      << lines.front();
  const std::vector<std::size_t> few(6, 64);
  const auto better =
      doubts(config({documents(few), "data.sequence_length=3000", "train_batch_size=1",
                     "train_micro_batch_size_per_gpu=1", "gradient_accumulation_steps=1"}));
  ASSERT_EQ(better.size(), 1U);
  EXPECT_NE(better.front().find("87% of the tokens of data.documents are padding"),
            std::string::npos)
      << better.front();
  EXPECT_NE(better.front().find("with data.sequence_length 64 it is 0%"), std::string::npos)
      << better.front();
}

TEST_F(RunDoubts, SequencesLongerThanThoseOfTheModelsTraining) {
  const auto with_folder = [&](const std::string& json, const std::vector<std::string>& overrides) {
    directory_.write("model/config.json", json);
    config::Config config = this->config(overrides);
    config.initial_weights = directory_.path() / "model";
    config.ballast.steps = 1;
    return config;
  };
  const std::string plain = R"({"max_position_embeddings": 32})";
  expect_of(with_folder(plain, {}), {"data.sequence_length is 37", "at most 32 tokens"});
  EXPECT_TRUE(doubts(with_folder(R"({"max_position_embeddings": 64})", {})).empty());
  // Scaling reaches further than the trained length.
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const auto scaled = [key](int factor) {
      return fmt::format(R"({{"max_position_embeddings": 8, "{}": {{"rope_type": "yarn",
                             "factor": {}, "original_max_position_embeddings": 8}}}})",
                         key, factor);
    };
    expect_of(with_folder(scaled(4), {}), {"at most 32 tokens"});
    EXPECT_TRUE(doubts(with_folder(scaled(8), {})).empty());
  }
  // Positions begin again at each document.
  const std::string short_ones = documents(std::vector<std::size_t>(40, 30));
  EXPECT_TRUE(doubts(with_folder(plain, {short_ones})).empty());
  expect_of(with_folder(plain, {documents(std::vector<std::size_t>(20, 60))}),
            {"the longest document has 60 tokens"});
}

TEST_F(RunDoubts, WarnIfNearlyAllIdsAreEqual) {
  const auto warning = [&](const std::vector<std::uint16_t>& ids) {
    const auto file = directory_.write("ids.bin", test::bytes_of(ids)).string();
    const test::CapturedLog log;
    config::Config config = this->config({});
    config.data.text.clear();
    config.data.tokens = {file};
    static_cast<void>(data::open_training_data(config));
    return log.text();
  };
  std::vector<std::uint16_t> ids(20000);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = i * i % 251;
  EXPECT_EQ(warning(ids), "");
  // Half of it is padding.
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (i / 100 % 2 == 0) ids[i] = 2;
  }
  EXPECT_NE(warning(ids).find("are id 2: if this is padding"), std::string::npos) << warning(ids);
  EXPECT_NE(warning(std::vector<std::uint16_t>(20000, 3)).find("are id 3: is the file complete?"),
            std::string::npos);
}

}  // namespace
}  // namespace ballast::train::run_doubts_test
