// Device memory that NCCL takes in addition to the budget, on a fake GPU.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/comm/communicator.h"
#include "ballast/engine/blueprint.h"
#include "ballast/setup/translate.h"

#include "tests/support/fake_cuda.h"
#include "tests/support/fake_nccl.h"
#include "tests/support/tiny_config.h"

namespace ballast::comm::nccl_memory_test {
namespace {

using test::FakeCuda;
using test::FakeNccl;

constexpr Bytes kOfChannel = 300 * kMiB;

class NcclMemory : public testing::Test {
 protected:
  NcclMemory() {
    FakeCuda::seed = 10;  // a strict fake only maps the memory, which is large
    FakeCuda::library_memory = 1536 * kMiB;
    FakeNccl::channel_memory = kOfChannel;
  }
  ~NcclMemory() override {
    FakeCuda::library_memory = 0;
    FakeCuda::with_library_memory = 0;
    FakeNccl::channel_memory = 0;
    FakeCuda::started_cublaslt = 0;
    FakeCuda::seed = seed_;
  }

 private:
  std::uint64_t seed_ = FakeCuda::seed;
};

config::Config config_for(std::uint64_t ranks, std::vector<std::string> overrides) {
  overrides.insert(overrides.begin(), {"ballast.device=cuda", "ballast.device_bytes=auto"});
  return test::tiny_config(R"("family": "llama", "vocab_size": 131, "hidden_size": 32,
                              "num_layers": 2, "num_heads": 4)",
                           true, "/run", overrides, ranks);
}

/// Makes the channels of a rank on a GPU of which the budget is in use. Throws Error(comm).
void make_channels(const config::Config& config, std::uint32_t world) {
  const Bytes budget = setup::resolve_budgets(config, {}, kGiB, world).device;
  const auto device = device::make_device({.kind = "cuda", .budget = budget});
  device->allocate(budget, "everything");
  ASSERT_TRUE(FakeCuda::start_library(FakeCuda::started_cublaslt));
  const auto ranks = join_ranks({}, {});
  std::vector<std::unique_ptr<Communicator>> channels;
  for (std::uint32_t i = 0; i < setup::channels_per_device(config, world); ++i) {
    channels.push_back(ranks->make_communicator(*device));
  }
}

TEST_F(NcclMemory, AnAutomaticBudgetLeavesRoomForTheChannelsOfTheRun) {
  EXPECT_NO_THROW(make_channels(config_for(2, {}), 2));
}

TEST_F(NcclMemory, AnAutomaticBudgetLeavesRoomForSeveralChannels) {
  const config::Config config =
      config_for(16, {"zero_optimization.stage=3", "zero_optimization.zero_hpz_partition_size=2",
                      "tensor_parallel.autotp_size=2", "model.layer_tiles=2",
                      "train_micro_batch_size_per_gpu=2"});
  EXPECT_EQ(setup::channels_per_device(config, 16), 4U);
  EXPECT_NO_THROW(make_channels(config, 16));
}

TEST_F(NcclMemory, TheChannelsOfARunFollowFromItsMesh) {
  const auto count = [](const Mesh& mesh, std::uint32_t per_copy, bool experts) {
    return engine::ChannelMembers(mesh, per_copy, experts).count();
  };
  EXPECT_EQ(count({}, 1, false), 0U);
  EXPECT_EQ(count({.data = 4}, 4, false), 1U);
  EXPECT_EQ(count({.data = 4}, 2, false), 3U);
  EXPECT_EQ(count({.data = 4}, 4, true), 2U) << "gathers continue while rows are exchanged";
  EXPECT_EQ(count({.tensor = 4}, 1, false), 1U) << "each rank has its tensors alone";
  EXPECT_EQ(count({.data = 2, .sequence = 2, .tensor = 2}, 4, false), 3U);
  const engine::ChannelMembers members({.data = 4, .tensor = 2, .rank = 3}, 2, false);
  using Ranks = std::vector<std::uint32_t>;
  EXPECT_EQ(members.all, (Ranks{1, 5, 3, 7}));
  EXPECT_EQ(members.weight_copy, (Ranks{1, 3}));
  EXPECT_EQ(members.same_share, (Ranks{3, 7}));
  EXPECT_EQ(members.tensor, (Ranks{2, 3}));
}

}  // namespace
}  // namespace ballast::comm::nccl_memory_test
