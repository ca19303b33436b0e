#include <algorithm>

#include <gtest/gtest.h>

#include "tests/unit/config/samples.h"

namespace ballast::config::storage_test {
namespace {

using test::error_of;
using test::kMinimal;
using test::parse_text;
using test::with;
using Paths = std::vector<std::filesystem::path>;

const std::string kOptimizerPath = "zero_optimization.offload_optimizer.nvme_path";

Paths read_paths(const std::string& value) {
  return parse_text(kMinimal, {kOptimizerPath + "=" + value}).zero.optimizer.nvme_path;
}

TEST(ConfigSwapPaths, AreNoneOneOrSeveral) {
  EXPECT_EQ(read_paths("null"), Paths{});
  EXPECT_EQ(read_paths("\"\""), Paths{});
  EXPECT_EQ(read_paths("[]"), Paths{});
  EXPECT_EQ(read_paths("swap/"), Paths{"/base/swap"});
  EXPECT_EQ(read_paths("[\"/a\"]"), Paths{"/a"});
  EXPECT_EQ(read_paths("[\"/b/\", \"x/../y\", \"/\"]"), (Paths{"/b", "/base/y", "/"}));
}

TEST(ConfigSwapPaths, ArePrintedAsTheyAreMeant) {
  const auto printed = [](const std::string& value) {
    return print(parse_text(kMinimal, {kOptimizerPath + "=" + value}));
  };
  EXPECT_NE(printed("[\"/a\"]").find("\"nvme_path\": \"/a\","), std::string::npos);
  EXPECT_NE(printed("[\"/a\", \"/b\"]").find("\"nvme_path\": [\n"), std::string::npos);
  EXPECT_EQ(printed("[]"), printed("null"));
}

TEST(ConfigAio, HasTheDefaultsOfTheHeader) {
  const AioSection aio = parse_text(kMinimal).aio;
  EXPECT_EQ(aio.in_flight_bytes, 64 * kMiB);
  EXPECT_EQ(aio.stall_seconds, 30.0);
  EXPECT_EQ(aio.abandon_seconds, 300.0);
  EXPECT_FALSE(aio.sqpoll || aio.iopoll || aio.buffered || aio.any_file_system);
  EXPECT_TRUE(aio.paths.empty());
}

TEST(ConfigAioPaths, InheritWhatTheyLeaveOut) {
  const std::string paths = R"([{"path": "a", "queue_depth": 7}, {"path": "/b/", "read_gbps": 2}])";
  const auto aio = parse_text(kMinimal, {"aio.paths=" + paths, "aio.block_size=8192",
                                         "aio.queue_depth=9", "aio.backend=threads"})
                       .aio;
  const std::vector<AioPath> wanted = {
      {.path = "/base/a", .block_size = 8192, .queue_depth = 7, .backend = IoBackend::threads},
      {.path = "/b",
       .block_size = 8192,
       .queue_depth = 9,
       .backend = IoBackend::threads,
       .read_gbps = 2.0,
       .write_gbps = 0.0}};
  EXPECT_EQ(aio.paths, wanted);
}

TEST(ConfigAioPaths, ThatNothingUsesAreNoted) {
  const std::string entry = "aio.paths=[{\"path\": \"/a\"}, {\"path\": \"/b\"}]";
  const Config some = parse_text(kMinimal, {entry, kOptimizerPath + "=/a"});
  const std::vector<std::string> note = {"aio.paths[1]: no nvme_path names /b"};
  EXPECT_EQ(some.ignored, note);
  EXPECT_TRUE(parse_text(kMinimal, {entry, kOptimizerPath + "=/a",
                                    "zero_optimization.offload_param.nvme_path=/b"})
                  .ignored.empty());
  EXPECT_TRUE(parse_text(kMinimal, {entry}).ignored.empty());
}

/// `path` is the key that the message names, `message` its end.
struct Refusal {
  std::string setting;
  std::string path;
  std::string message;
};

class ConfigStorageRefusal : public testing::TestWithParam<Refusal> {};

TEST_P(ConfigStorageRefusal, NamesTheKeyAndWhatToDo) {
  const std::string error = error_of(kMinimal, {GetParam().setting});
  const std::string start = "c.json: " + GetParam().path;
  EXPECT_EQ(error.substr(0, start.size()), start);
  EXPECT_NE(error.find(": " + GetParam().message), std::string::npos) << error;
  EXPECT_EQ(std::count(error.begin(), error.end(), '\n'), 0);
}

INSTANTIATE_TEST_SUITE_P(
    All, ConfigStorageRefusal,
    testing::Values(
        Refusal{kOptimizerPath + "=3", kOptimizerPath, "expected a path or an array of paths"},
        Refusal{kOptimizerPath + "=[3]", kOptimizerPath + "[0]", "expected a string, got 3"},
        Refusal{kOptimizerPath + "=[\"\"]", kOptimizerPath + "[0]",
                "expected a path, got an empty string"},
        Refusal{kOptimizerPath + "=[\"/a\", \"/b\", \"/x/../a/\"]", kOptimizerPath + "[2]",
                "/a is listed twice; remove one"},
        Refusal{"aio.in_flight_bytes=100", "aio.in_flight_bytes", "must be at least 4096, got 100"},
        Refusal{"aio.stall_seconds=0", "aio.stall_seconds",
                "must be above 0 and at most 1000000, got 0"},
        Refusal{"aio.stall_seconds=301", "aio.abandon_seconds", "300 is below stall_seconds 301"},
        Refusal{"aio.abandon_seconds=29.5", "aio.abandon_seconds", "29.5 is below stall_seconds"},
        Refusal{"aio.sqpoll=1", "aio.sqpoll", "expected true or false, got 1"},
        Refusal{"aio.any_filesystem=true", "aio.any_filesystem",
                "unknown key (did you mean 'any_file_system'?)"},
        Refusal{"aio.paths={}", "aio.paths", "expected an array of objects, got an object"},
        Refusal{"aio.paths=[\"/a\"]", "aio.paths[0]", "expected an object"},
        Refusal{"aio.paths=[{\"queue_depth\": 3}]", "aio.paths[0]", "lacks \"path\"; add it"},
        Refusal{"aio.paths=[{\"path\": \"\"}]", "aio.paths[0].path",
                "expected a path, got an empty string"},
        Refusal{"aio.paths=[{\"path\": \"/a\"}, {\"path\": \"/a/\"}]", "aio.paths[1].path",
                "/a is listed twice; remove one"},
        Refusal{"aio.paths=[{\"path\": \"/a\", \"block_size\": 5000}]", "aio.paths[0].block_size",
                "must be a multiple of 4 KiB (4096), got 5000"},
        Refusal{"aio.paths=[{\"path\": \"/a\", \"backend\": \"null\"}]", "aio.paths[0].backend",
                "expected one of auto, io_uring, threads, got the string \"null\""},
        Refusal{"aio.paths=[{\"path\": \"/a\", \"read_gbps\": -1}]", "aio.paths[0].read_gbps",
                "must be at least 0 and at most 1000000, got -1"},
        Refusal{"aio.paths=[{\"path\": \"/a\", \"gbps\": 1}]", "aio.paths[0].gbps",
                "unknown key"}));

TEST(ConfigAio, RefusesPollingThroughThePageCache) {
  EXPECT_NE(
      error_of(kMinimal, {"aio.buffered=true", "aio.iopoll=true"}).find("needs direct I/O, but"),
      std::string::npos);
}

TEST(ConfigRecompute, RefusalsNameTheChoices) {
  for (const std::string key : {R"("recompute": "most")", R"("recompute": 1)"}) {
    const std::string error = error_of(with(R"("ballast": {)" + key + "}"));
    EXPECT_NE(error.find("ballast.recompute: expected true, false or \"except_attention\", got"),
              std::string::npos)
        << error;
  }
}

}  // namespace
}  // namespace ballast::config::storage_test
