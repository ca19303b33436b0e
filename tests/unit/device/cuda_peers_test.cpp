#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/device/device.h"

#include "tests/support/captured_log.h"
#include "tests/support/fake_cuda.h"

namespace ballast::device::cuda_peers_test {
namespace {

using test::FakeCuda;

constexpr Bytes kBytes = 8 * kKiB;

/// Other tests look for GPUs that cannot be used at the lower numbers, and results of the search
/// are kept.
std::unique_ptr<Device> make(std::uint32_t number) {
  return make_device({.kind = "cuda", .budget = 16 * kKiB, .local_rank = 40 + number});
}

/// Copies numbers to `from`, from there to `to`, and back from there.
void expect_copy(Device& from, Device& to) {
  std::vector<std::byte> sent(kBytes);
  for (std::size_t i = 0; i < sent.size(); ++i) sent[i] = static_cast<std::byte>(i % 251);
  std::vector<std::byte> received(kBytes);
  const DeviceBytes source = from.allocate(kBytes, "source");
  const DeviceBytes target = to.allocate(kBytes, "target");
  const auto stream = from.make_stream("from");
  const auto other = to.make_stream("to");
  const std::size_t before = FakeCuda::copied_to_peers;
  from.copy_to_device(*stream, source, sent);
  from.copy_to_other(*stream, to, target, source);
  stream->synchronize();
  to.copy_to_host(*other, received, target);
  other->synchronize();
  EXPECT_EQ(received, sent);
  EXPECT_EQ(FakeCuda::copied_to_peers - before, kBytes);
}

TEST(CudaPeers, CopyDirectlyOrThroughTheHost) {
  const auto first = make(1);
  const auto second = make(2);
  EXPECT_TRUE(first->connect(*second));
  EXPECT_TRUE(first->connect(*second)) << "twice";
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  expect_copy(*first, *second);
  FakeCuda::peers = false;
  EXPECT_FALSE(second->connect(*first));
  expect_copy(*second, *first);
  FakeCuda::peers = true;
}

TEST(CudaPeers, CopyThroughTheHostIfDirectCopiesAreLost) {
  const auto first = make(5);
  const auto second = make(6);
  const test::CapturedLog log;
  FakeCuda::peers_lose_copies = true;
  EXPECT_FALSE(first->connect(*second));
  EXPECT_FALSE(first->connect(*second)) << "twice";
  expect_copy(*first, *second);
  FakeCuda::peers_lose_copies = false;
  EXPECT_NE(log.text().find("do not arrive, although the driver allows them"), std::string::npos)
      << log.text();
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST(CudaPeers, CopyThroughTheHostIfDirectCopiesCannotBeEnabled) {
  const auto first = make(5);
  const auto second = make(6);
  const test::CapturedLog log;
  FakeCuda::peers_enabling = cudaErrorUnsupportedLimit;
  EXPECT_FALSE(first->connect(*second));
  FakeCuda::peers_enabling = cudaSuccess;
  expect_copy(*first, *second);
  EXPECT_EQ(log.text().find("direct copies between CUDA devices "), 0U) << log.text();
  EXPECT_NE(log.text().find(" fail ("), std::string::npos) << log.text();
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST(CudaPeers, TwoDevicesShareAGpu) {
  const auto first = make(3);
  const auto second = make(3);
  EXPECT_TRUE(first->connect(*second));
  expect_copy(*first, *second);
}

TEST(CudaPeers, OfAnotherKindAreRefused) {
  const auto gpu = make(0);
  const auto host = make_device({.kind = "host", .budget = 16 * kKiB});
  EXPECT_THROW(gpu->connect(*host), Error);
}

}  // namespace
}  // namespace ballast::device::cuda_peers_test
