#include <filesystem>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "ballast/setup/translate.h"

#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"

namespace ballast::setup::swap_options_test {
namespace {

const std::string kModel =
    R"("vocab_size": 131, "hidden_size": 32, "num_layers": 2, "num_heads": 2)";

state::SwapOptions options(const std::vector<std::string>& overrides) {
  return swap_options(test::tiny_config(kModel, true, "/run", overrides));
}

std::vector<std::string> directories(const state::SwapOptions& options) {
  std::vector<std::string> found;
  for (const auto& path : options.paths) found.push_back(path.directory.string());
  return found;
}

TEST(SwapOptions, TakeTheRunDirectoryWhenNoPathIsGiven) {
  const auto swap = options({"aio.any_file_system=false"});
  EXPECT_EQ(directories(swap), std::vector<std::string>{"/run"});
  EXPECT_TRUE(swap.paths[0].made_later);
  EXPECT_EQ(swap.access, aio::File::Access::direct);
  EXPECT_FALSE(swap.any_file_system);
}

TEST(SwapOptions, UniteThePathsOfBothSectionsInOrder) {
  const auto swap = options({"zero_optimization.offload_optimizer.nvme_path=[\"/b\", \"/a\"]",
                             "zero_optimization.offload_param.nvme_path=[\"/a\", \"/c\"]"});
  EXPECT_EQ(directories(swap), (std::vector<std::string>{"/b", "/a", "/c"}));
}

TEST(SwapOptions, AMissingPathIsMadeInAnExistingFolder) {
  const test::TempDir folder;
  const std::string here = folder.path().string();
  std::filesystem::create_symlink("nowhere", folder.path() / "link");
  const auto swap = options({fmt::format(
      R"(zero_optimization.offload_optimizer.nvme_path=["{0}", "{0}/new", "{0}/no/new", "{0}/link"])",
      here)});
  std::vector<bool> made;
  for (const auto& path : swap.paths) made.push_back(path.made_later);
  EXPECT_EQ(made, (std::vector<bool>{false, true, false, false}));
  EXPECT_EQ(swap.paths[1].existing(), folder.path());
}

TEST(SwapOptions, UseThePathsSettingsBeforeTheCommonOnes) {
  const auto swap = options(
      {"zero_optimization.offload_optimizer.nvme_path=[\"/a\", \"/b\"]", "aio.block_size=8192",
       "aio.queue_depth=3", "aio.backend=threads", "aio.in_flight_bytes=65536",
       "aio.stall_seconds=2", "aio.abandon_seconds=4", "aio.sqpoll=true", "aio.iopoll=true",
       "aio.any_file_system=true",
       R"(aio.paths=[{"path": "/b", "block_size": 4096, "queue_depth": 7, "backend": "io_uring",
                      "read_gbps": 3, "write_gbps": 2}])"});
  ASSERT_EQ(swap.paths.size(), 2U);
  EXPECT_TRUE(swap.any_file_system);
  for (const auto& path : swap.paths) {
    EXPECT_EQ(path.io.in_flight_bytes, 65536U);
    EXPECT_EQ(path.io.stall_seconds, 2.0);
    EXPECT_EQ(path.io.abandon_seconds, 4.0);
    EXPECT_TRUE(path.io.sqpoll && path.io.iopoll);
  }
  EXPECT_EQ(swap.paths[0].io.block_bytes, 8192U);
  EXPECT_EQ(swap.paths[0].io.depth, 3U);
  EXPECT_EQ(swap.paths[0].io.backend, "threads");
  EXPECT_EQ(swap.paths[0].read_gbps, 0.0);
  EXPECT_EQ(swap.paths[1].io.block_bytes, 4096U);
  EXPECT_EQ(swap.paths[1].io.depth, 7U);
  EXPECT_EQ(swap.paths[1].io.backend, "io_uring");
  EXPECT_EQ(swap.paths[1].read_gbps, 3.0);
  EXPECT_EQ(swap.paths[1].write_gbps, 2.0);
}

TEST(SwapOptions, UseThePageCacheOnlyIfConfigured) {
  EXPECT_EQ(options({"aio.buffered=true"}).access, aio::File::Access::buffered);
}

/// Swap directories of the rank with that number on a machine with `local_world` ranks.
std::vector<std::string> dealt(const std::string& paths, std::uint32_t local_rank,
                               std::uint32_t local_world) {
  const auto config = test::tiny_config(kModel, true, "/run",
                                        {"zero_optimization.offload_optimizer.nvme_path=" + paths});
  // The rank's number in the run does not matter: ranks on other machines have their own paths.
  return directories(swap_options(config, {.launcher = "mpirun",
                                           .rank = 10 + local_rank,
                                           .world = 20,
                                           .local_rank = local_rank,
                                           .local_world = local_world}));
}

TEST(SwapOptions, AssignPathsRoundRobinToRanks) {
  using Paths = std::vector<std::string>;
  const std::string three = R"(["/a", "/b", "/c"])";
  EXPECT_EQ(dealt(three, 0, 1), (Paths{"/a", "/b", "/c"}));
  EXPECT_EQ(dealt(three, 0, 2), (Paths{"/a", "/c"}));
  EXPECT_EQ(dealt(three, 1, 2), (Paths{"/b"}));
  EXPECT_EQ(dealt(three, 2, 3), (Paths{"/c"}));
  EXPECT_EQ(dealt(three, 3, 5), (Paths{"/a"}));
  EXPECT_EQ(dealt(three, 4, 5), (Paths{"/b"}));
  EXPECT_EQ(dealt("[]", 1, 2), (Paths{"/run"}));
}

}  // namespace
}  // namespace ballast::setup::swap_options_test
