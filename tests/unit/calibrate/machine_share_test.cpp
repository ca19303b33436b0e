#include "src/calibrate/machine_share.h"

#include <bit>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/setup/run_plan.h"

#include "tests/support/thread_ranks.h"
#include "tests/support/tiny_config.h"

namespace ballast::calibrate::machine_share_test {
namespace {

/// A rank on machine `host` of 8 CPUs, one bit of `cpus` for each that it may run on.
RankPlace place(char host, std::uint64_t local_rank, std::uint64_t cpus, Bytes available = kGiB) {
  RankPlace found;
  found.host[0] = host;
  found.available = available;
  found.usable_cpus = static_cast<std::uint64_t>(std::popcount(cpus));
  found.online_cpus = 8;
  found.local_rank = local_rank;
  found.numa_nodes = 2;
  found.cpus[0] = cpus;
  return found;
}

TEST(MachineShare, ASingleRankHasAllResources) {
  const MachineShare share = share_of({place('a', 0, 0xff)}, 0);
  EXPECT_EQ(share.memory, kGiB);
  EXPECT_EQ(share.cpus, 8);
  EXPECT_EQ(share.sharing, 1);
  EXPECT_EQ(share.numa_node, -1);
}

TEST(MachineShare, RanksWithoutABindingShareCoresAndNodes) {
  const std::vector<RankPlace> places = {place('a', 0, 0xff), place('a', 1, 0xff),
                                         place('a', 2, 0xff)};
  for (std::size_t rank = 0; rank < 3; ++rank) {
    const MachineShare share = share_of(places, rank);
    EXPECT_EQ(share.memory, kGiB / 3);
    EXPECT_EQ(share.cpus, 2);
    EXPECT_EQ(share.sharing, 3);
    EXPECT_EQ(share.numa_node, rank == 2 ? 1 : 0);
  }
}

TEST(MachineShare, MoreRanksThanCoresHaveOneThreadEach) {
  const std::vector<RankPlace> places(9, place('a', 0, 0xff));
  EXPECT_EQ(share_of(places, 0).cpus, 1);
}

TEST(MachineShare, BoundRanksShareOnlyWithRanksOnTheSameCores) {
  const std::vector<RankPlace> places = {place('a', 0, 0x0f), place('a', 1, 0x0f),
                                         place('a', 2, 0xf0), place('b', 0, 0x0f)};
  EXPECT_TRUE(places[0].bound());
  EXPECT_EQ(share_of(places, 0).cpus, 2);
  EXPECT_EQ(share_of(places, 1).sharing, 2);
  EXPECT_EQ(share_of(places, 2).cpus, 4);
  EXPECT_EQ(share_of(places, 3).cpus, 4);
  EXPECT_EQ(share_of(places, 3).numa_node, -1);
  // All need the same workspace, so all compute with the number of threads of the rank with the
  // fewest CPUs.
  for (std::size_t rank = 0; rank < 4; ++rank) EXPECT_EQ(share_of(places, rank).compute_threads, 2);
}

TEST(MachineShare, AllRanksUseTheSmallestShareOfMemory) {
  const std::vector<RankPlace> places = {
      place('a', 0, 0xff, 10 * kGiB), place('a', 1, 0xff, 9 * kGiB), place('b', 0, 0xff, 6 * kGiB)};
  for (std::size_t rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(share_of(places, rank).memory, 9 * kGiB / 2);
  }
}

TEST(MachineShare, AllRanksUseTheBudgetOfTheSmallestGpu) {
  std::vector<RankPlace> places = {place('a', 0, 0xff), place('a', 1, 0xff), place('b', 0, 0xff)};
  EXPECT_EQ(share_of(places, 0).device_memory, 0U) << "the host device has only host memory";
  places[0].device_memory = 400;
  places[1].device_memory = 200;
  places[2].device_memory = 300;
  for (std::size_t rank = 0; rank < 3; ++rank) {
    const MachineShare share = share_of(places, rank);
    EXPECT_EQ(share.device_memory, 200U);
    config::Config open;
    setup::apply_common_share(open, share);
    EXPECT_EQ(open.ballast.device_bytes, 100U)
        << "a quarter is left free for libraries, and one for the channel of the ranks";
    EXPECT_EQ(open.ballast.host_bytes, share.memory / 5 * 4);
  }
}

TEST(MachineShare, AllRanksComputeOnDevicesOfOneKind) {
  using enum config::DeviceChoice;
  std::vector<RankPlace> places = {place('a', 0, 0xff), place('b', 0, 0xff)};
  const auto device_of = [&](config::DeviceChoice asked) {
    config::Config config;
    config.ballast.device = asked;
    setup::apply_common_share(config, share_of(places, 0));
    return config.ballast.device;
  };
  places[0].device_memory = 400;
  EXPECT_EQ(device_of(automatic), host) << "one rank has no GPU";
  EXPECT_EQ(device_of(cuda), cuda) << "a named device never falls back";
  places[1].device_memory = 300;
  EXPECT_EQ(device_of(automatic), cuda);
  EXPECT_EQ(device_of(host), host);
}

TEST(MachineShare, RatesOfARankShareCoresOnlyWhereComputeHasThem) {
  const PeerRanks peers = {.world = 4, .local_world = 2, .sharing = 4, .received_per_second = 5.0};
  plan::Rates host;
  host.shared_cores = 8;
  host.read_per_second = 6.0;
  share_out(host, peers);
  EXPECT_EQ(host.shared_cores, 2U);
  EXPECT_EQ(host.read_per_second, 3.0);
  EXPECT_EQ(host.fabric_per_second, 5.0);
  plan::Rates gpu;
  share_out(gpu, peers);
  EXPECT_EQ(gpu.shared_cores, 0U);
}

TEST(MachineShare, FillsWhatTheConfigLeavesOpenAndNothingElse) {
  const MachineShare share = {
      .memory = 1000, .compute_threads = 2, .cpus = 3, .sharing = 4, .numa_node = 1};
  config::Config open;
  setup::apply_common_share(open, share);
  EXPECT_EQ(open.ballast.device_bytes, 400U);
  EXPECT_EQ(open.ballast.host_bytes, 400U);
  EXPECT_EQ(open.ballast.compute_threads, 2);
  EXPECT_EQ(open.ballast.update_threads, 0);
  setup::apply_own_share(open, share);
  EXPECT_EQ(open.ballast.update_threads, 3);
  EXPECT_EQ(open.ballast.update_numa_node, 1);

  config::Config named;
  named.ballast.device_bytes = 10;
  named.ballast.host_bytes = 20;
  named.ballast.compute_threads = 5;
  named.ballast.update_threads = 6;
  named.ballast.update_numa_node = 0;
  setup::apply_common_share(named, share);
  setup::apply_own_share(named, share);
  EXPECT_EQ(named.ballast.device_bytes, 10U);
  EXPECT_EQ(named.ballast.host_bytes, 20U);
  EXPECT_EQ(named.ballast.compute_threads, 5);
  EXPECT_EQ(named.ballast.update_threads, 6);
  EXPECT_EQ(named.ballast.update_numa_node, 0);
}

TEST(CommonConfig, IsThatOfTheFirstRankOnAll) {
  std::vector<std::string> printed(3);
  test::as_ranks(3, [&](comm::Ranks& ranks) {
    const std::string number = std::to_string(ranks.rank());
    config::Config mine = test::tiny_config(
        R"("vocab_size": 131, "hidden_size": 32, "num_layers": 2, "num_heads": 2)", true,
        "/run" + number, {"ballast.seed=" + number, "ballast.host_bytes=\"auto\""});
    mine.batch.train_batch *= 3;
    printed[ranks.rank()] = config::print(setup::plan_run(mine, &ranks).config);
  });
  EXPECT_EQ(printed[1], printed[0]);
  EXPECT_EQ(printed[2], printed[0]);
  EXPECT_NE(printed[0].find("\"seed\": 0,"), std::string::npos) << printed[0];
  EXPECT_NE(printed[0].find("\"/run0\""), std::string::npos) << printed[0];
  EXPECT_EQ(printed[0].find("\"host_bytes\": \"auto\""), std::string::npos) << printed[0];
}

}  // namespace
}  // namespace ballast::calibrate::machine_share_test
