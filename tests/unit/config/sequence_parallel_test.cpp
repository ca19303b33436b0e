#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/config/config.h"
#include "ballast/core/error.h"

#include "tests/unit/config/samples.h"

namespace ballast::config::sequence_parallel_test {
namespace {

using test::kMinimal;

TEST(ConfigSequenceParallel, SharesTheBatchAmongGroupsOfRanks) {
  const auto batch_of = [](std::vector<std::string> overrides, std::uint64_t ranks) {
    return parse(kMinimal, "/", "c.json", overrides, ranks).batch;
  };
  const BatchSection shared = batch_of({"sequence_parallel_size=2"}, 4);
  EXPECT_EQ(shared.micro_batch, 4U);
  EXPECT_EQ(shared.train_batch, 8U);
  EXPECT_EQ(batch_of({"sequence_parallel_size=4"}, 4).micro_batch, 8U);
  EXPECT_EQ(batch_of({"sequence_parallel_size=0"}, 4).micro_batch, 2U);
  // The file of a run is read without its ranks.
  EXPECT_EQ(
      batch_of({"sequence_parallel_size=4", "train_micro_batch_size_per_gpu=2"}, 0).train_batch,
      2U);
}

TEST(ConfigSequenceParallel, SaysWhatDividesWhat) {
  const auto refusal_of = [](std::vector<std::string> overrides, std::uint64_t ranks) {
    try {
      parse(kMinimal, "/", "c.json", overrides, ranks);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const auto expect = [&](std::vector<std::string> overrides, std::uint64_t ranks,
                          const std::string& part) {
    const std::string message = refusal_of(std::move(overrides), ranks);
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  expect({"sequence_parallel_size=4"}, 6,
         "4 does not divide the 6 ranks of this run; it must divide the heads of keys (4), "
         "data.sequence_length (32) and the ranks; possible: 1, 2");
  expect({"sequence_parallel_size=8"}, 8, "8 does not divide the 4 heads of keys");
  expect({"sequence_parallel_size=4", "data.sequence_length=30"}, 8,
         "4 does not divide the 30 tokens of data.sequence_length");
  const std::string llama =
      R"(model={"family": "llama", "hidden_size": 64, "num_layers": 2, "num_heads": 4})";
  expect({llama, "model.layer_tiles=2", "sequence_parallel_size=2"}, 2,
         "attention in tiles is not shared by ranks");
  expect({llama,
          R"(model.rope_scaling={"type": "dynamic", "factor": 2.0,
                                 "original_max_position_embeddings": 16})",
          "sequence_parallel_size=2"},
         2, "depends on the length of each document");
  expect({"train_batch_size=6", "sequence_parallel_size=2"}, 8, "6 is not divisible by");
  expect({"sp_size=2"}, 2, "sequence_parallel_size");
  expect({"context_parallel_size=2"}, 2, "sequence_parallel_size");
}

}  // namespace
}  // namespace ballast::config::sequence_parallel_test
