// A store pins its host memory, tested on a fake of the CUDA runtime.
#include <algorithm>

#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/state/store.h"

#include "tests/support/captured_log.h"
#include "tests/support/fake_cuda.h"

namespace ballast::state::cuda_store_test {
namespace {

using test::FakeCuda;

class CudaStore : public testing::Test {
 protected:
  void SetUp() override {
    FakeCuda::registrations_left = -1;
    FakeCuda::refused_unregistrations = 0;
  }
  void TearDown() override {
    FakeCuda::registrations_left = -1;
    EXPECT_TRUE(FakeCuda::registered().empty());
    EXPECT_EQ(FakeCuda::refused_unregistrations, 0) << "unpinned after the memory was gone";
  }

  plan::Schedule schedule_{
      .buffers = {{.name = "weights", .tier = Tier::device, .bytes = 3 * kPage},
                  {.name = "small", .tier = Tier::host, .bytes = 10},
                  {.name = "states", .tier = Tier::host, .bytes = 2 * kMiB + 1}}};
  std::unique_ptr<device::Device> device_ =
      device::make_device({.kind = "cuda", .budget = 4 * kPage});
};

TEST_F(CudaStore, PinsItsHostBuffersAndNothingElse) {
  const Store store(schedule_, {device_.get()}, {});
  const std::byte* at = store.host(1, 1).data();
  Bytes pinned = 0;
  for (const FakeCuda::Piece& piece : FakeCuda::registered()) {
    EXPECT_EQ(piece.start, at + pinned);
    pinned += piece.size;
  }
  EXPECT_EQ(pinned, store.allocated(Tier::host));
  EXPECT_EQ(pinned, store.pinned());
  EXPECT_EQ(pinned, 2 * kMiB + 2 * kPage);
}

/// A GPU places the pages that it pins on its NUMA node.
TEST_F(CudaStore, PinsTheHostBuffersOfEachGpuByThatGpu) {
  const auto other = device::make_device({.kind = "cuda", .budget = 4 * kPage, .local_rank = 1});
  for (const std::uint8_t d : {0, 1, 0, 1}) {
    schedule_.buffers.push_back({.name = "home", .tier = Tier::host, .bytes = kMiB, .device = d});
  }
  const Store store(schedule_, {device_.get(), other.get()}, {});
  Bytes pinned = 0;
  for (const FakeCuda::Piece& piece : FakeCuda::registered()) pinned += piece.size;
  EXPECT_EQ(pinned, store.allocated(Tier::host));
  EXPECT_EQ(pinned, store.pinned());
  for (plan::BufferId id = 0; id < schedule_.buffers.size(); ++id) {
    const plan::Buffer& buffer = schedule_.buffers[id];
    if (buffer.tier != Tier::host) continue;
    const HostBytes bytes = store.host(id, buffer.bytes);
    Bytes by_its_gpu = 0;
    for (const FakeCuda::Piece& piece : FakeCuda::registered()) {
      const auto* const from = std::max<const std::byte*>(piece.start, bytes.data());
      const auto* const to =
          std::min<const std::byte*>(piece.start + piece.size, bytes.data() + bytes.size());
      if (from < to && piece.gpu == buffer.device) by_its_gpu += static_cast<Bytes>(to - from);
    }
    EXPECT_EQ(by_its_gpu, buffer.bytes) << buffer.name << ' ' << id;
  }
}

TEST_F(CudaStore, WithoutHostBuffersPinsNothing) {
  schedule_.buffers.resize(1);
  const Store store(schedule_, {device_.get()}, {});
  EXPECT_TRUE(FakeCuda::registered().empty());
}

/// TearDown checks that a failed construction has left nothing pinned.
TEST_F(CudaStore, UnpinsMemoryIfALaterAllocationFails) {
  schedule_.buffers.push_back({.name = "too much", .tier = Tier::device, .bytes = kMiB});
  EXPECT_THROW(Store(schedule_, {device_.get()}, {}), Error);
}

TEST_F(CudaStore, WorksWithPageableMemoryAndSaysWhichKeyToLower) {
  FakeCuda::registrations_left = 0;
  const test::CapturedLog log;
  const Store store(schedule_, {device_.get()}, {});
  EXPECT_EQ(store.pinned(), 0U);
  EXPECT_NE(log.text().find("lower ballast.host_bytes"), std::string::npos) << log.text();
}

}  // namespace
}  // namespace ballast::state::cuda_store_test
