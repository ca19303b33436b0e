#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/unit/config/samples.h"

// The devices of a rank: pipeline.stages and ballast.devices.

namespace ballast::config::rank_devices_test {
namespace {

using test::error_of;
using test::ignored_paths;
using test::kMinimal;
using test::parse_text;
using test::with;

using Numbers = std::vector<std::uint32_t>;

TEST(RankDevices, ARankHasOneUnlessStagesOrNumbersAreGiven) {
  EXPECT_EQ(parse_text(kMinimal).pipeline.stages, 1U);
  EXPECT_EQ(parse_text(kMinimal).model.vocabulary_tiles, 1U);
  EXPECT_EQ(parse_text(kMinimal, {"pipeline.stages=2"}).pipeline.stages, 2U);
  EXPECT_EQ(parse_text(kMinimal, {"pipeline.stages=auto"}).pipeline.stages, 0U);
  const Config listed = parse_text(kMinimal, {"ballast.devices=[1, 1]"});
  EXPECT_EQ(listed.pipeline.stages, 2U);
  EXPECT_EQ(listed.ballast.devices, (Numbers{1, 1}));
  const Config open = parse_text(kMinimal, {"ballast.devices=[1, 0]", "pipeline.stages=auto"});
  EXPECT_EQ(open.pipeline.stages, 0U);
  const Config again = parse_text(print(open));
  EXPECT_EQ(again.pipeline.stages, 0U);
  EXPECT_EQ(again.ballast.devices, (Numbers{1, 0}));
}

TEST(RankDevices, OtherKeysOfThePipelineAreIgnored) {
  const Config c = parse_text(
      with(R"("pipeline": {"stages": 1, "partition": "best", "pipe_partitioned": true})"));
  EXPECT_EQ(ignored_paths(c),
            (std::vector<std::string>{"pipeline.partition", "pipeline.pipe_partitioned"}));
}

TEST(RankDevices, ContradictionsAreRefused) {
  EXPECT_EQ(error_of(kMinimal, {"ballast.devices=[0, 1]", "pipeline.stages=3"}),
            "c.json: ballast.devices (--set ballast.devices=[0, 1]): lists 2 devices, but "
            "pipeline.stages is 3; list 3, or leave one of the two keys out");
  for (const std::string order : {"micro_batch_major", "micro_batch_major_offload"}) {
    EXPECT_NE(error_of(kMinimal, {"pipeline.stages=2", "ballast.order=" + order})
                  .find("is \"" + order +
                        "\", with which only one of the 2 devices of pipeline.stages would work at "
                        "a time; use \"layer_major\""),
              std::string::npos);
  }
  EXPECT_EQ(error_of(kMinimal, {"pipeline.stages=auto", "ballast.order=micro_batch_major"}), "");
  EXPECT_NE(error_of(kMinimal, {"pipeline.stages=9"}).find("at most 8"), std::string::npos);
  EXPECT_NE(error_of(kMinimal, {"ballast.devices=[]"}).find("must have 1 to 8 numbers, got 0"),
            std::string::npos);
}

TEST(RankDevices, OnesWithoutABlockAreRefused) {
  const std::vector<std::string> small = {"model.num_layers=2", "model.vocabulary_tiles=1",
                                          "model.tie_embeddings=false"};
  const auto with_stages = [&small](const char* stages) {
    std::vector<std::string> settings = small;
    settings.emplace_back(stages);
    return error_of(kMinimal, settings);
  };
  EXPECT_EQ(with_stages("pipeline.stages=3"), "") << "the head is on the third";
  EXPECT_NE(with_stages("pipeline.stages=4")
                .find("is 4, but the model has only 2 layers and 1 vocabulary tile to share; give "
                      "at most 3"),
            std::string::npos);
}

TEST(RankDevices, TheTilesOfTheVocabularyDoNotDependOnTheirNumber) {
  for (const char* vocabulary : {"1000", "3000000"}) {
    const std::string size = std::string("model.vocab_size=") + vocabulary;
    const std::uint64_t one = parse_text(kMinimal, {size}).model.vocabulary_tiles;
    EXPECT_EQ(one > 1, size.ends_with("3000000"));
    for (const char* stages : {"pipeline.stages=2", "pipeline.stages=auto"}) {
      EXPECT_EQ(parse_text(kMinimal, {size, stages}).model.vocabulary_tiles, one) << stages;
    }
  }
}

TEST(RankDevices, NamesOfOtherProgramsAreCorrected) {
  for (const char* name : {"pp_size", "pipeline_model_parallel_size", "pipeline_parallel_size"}) {
    EXPECT_NE(error_of(kMinimal, {std::string(name) + "=2"}).find("did you mean 'pipeline.stages'"),
              std::string::npos)
        << name;
  }
}

}  // namespace
}  // namespace ballast::config::rank_devices_test
