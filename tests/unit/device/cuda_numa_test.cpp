// Host memory of GPUs on two NUMA nodes, on a fake of the CUDA runtime.
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/memory.h"

#include "src/device/cuda/runtime.h"
#include "tests/support/fake_cuda.h"
#include "tests/support/temp_dir.h"

namespace ballast::device::cuda_numa_test {
namespace {

using test::FakeCuda;

/// A machine with two nodes: GPUs 0 and 1 are on node 0, GPU 2 is on node 1. The kernel does not
/// know the node of GPU 3. The addresses are those of the fake GPUs.
class TwoNodes : public testing::Test {
 protected:
  /// A request for memory on a node.
  struct Request {
    const std::byte* start;
    Bytes bytes;
    int node;
    std::size_t pinned_before;  ///< parts that were pinned already, which have pages
    bool operator==(const Request&) const = default;
  };

  void SetUp() override {
    FakeCuda::registrations_left = -1;
    const char* const nodes[] = {"0", "0", "1", "-1"};
    for (int gpu = 0; gpu < 4; ++gpu) {
      const auto folder = devices_.path() / ("face:0" + std::to_string(gpu) + ":00.0");
      std::filesystem::create_directory(folder);
      std::ofstream(folder / "numa_node") << nodes[gpu] << '\n';
    }
  }

  [[nodiscard]] std::unique_ptr<Pin> pin(int gpu, HostBytes memory, bool granted = true) {
    const auto prefer = [this, granted](HostBytes range, int node) {
      requests_.push_back({range.data(), range.size(), node, FakeCuda::registered().size()});
      return granted;
    };
    return make_cuda_pin(gpu, memory, "test", nullptr, {devices_.path(), prefer});
  }

  test::TempDir devices_;
  std::vector<Request> requests_;
};

TEST_F(TwoNodes, EachGpuAsksForItsNodeBeforeThePagesExist) {
  const Mapping mapping(16 * kPage, "test");
  const HostBytes homes = mapping.bytes();
  std::vector<std::unique_ptr<Pin>> pins;
  std::vector<Request> expected;
  for (const auto& [gpu, first, pages, node] : {std::tuple{0, 0, 3, 0}, std::tuple{2, 3, 4, 1},
                                                std::tuple{1, 7, 1, 0}, std::tuple{2, 8, 8, 1}}) {
    const HostBytes memory = homes.subspan(first * kPage, pages * kPage);
    expected.push_back({memory.data(), memory.size(), node, FakeCuda::registered().size()});
    pins.push_back(pin(gpu, memory));
    EXPECT_EQ(pins.back()->bytes(), memory.size());
  }
  EXPECT_EQ(requests_, expected);
}

TEST_F(TwoNodes, AGpuWithoutANodeAsksForNone) {
  const Mapping mapping(kPage, "test");
  const auto pinned = pin(3, mapping.bytes());
  EXPECT_EQ(pinned->bytes(), kPage);
  EXPECT_TRUE(requests_.empty());
}

TEST_F(TwoNodes, MemoryIsPinnedEvenIfTheKernelRefusesTheNode) {
  const Mapping mapping(kPage, "test");
  const auto pinned = pin(2, mapping.bytes(), false);
  EXPECT_EQ(pinned->bytes(), kPage);
  ASSERT_EQ(requests_.size(), 1U);
  EXPECT_EQ(requests_.front().node, 1);
}

}  // namespace
}  // namespace ballast::device::cuda_numa_test
