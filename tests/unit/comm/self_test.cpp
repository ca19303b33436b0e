#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <numeric>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/comm/communicator.h"
#include "ballast/core/error.h"

namespace ballast::comm::self_test {
namespace {

constexpr Bytes kSize = 3 * kPage;

class SelfCommunicatorTest : public testing::Test {
 protected:
  DeviceBytes filled(std::uint8_t seed) {
    const DeviceBytes made = device_->allocate(kSize, "test");
    std::memcpy(made.raw(), pattern(seed).data(), kSize);
    return made;
  }
  static std::vector<std::byte> pattern(std::uint8_t seed) {
    std::vector<std::byte> bytes(kSize);
    for (std::size_t i = 0; i < kSize; ++i) bytes[i] = std::byte(seed + i % 251);
    return bytes;
  }
  static bool equals(DeviceBytes bytes, std::uint8_t seed) {
    return std::ranges::equal(std::span(bytes.raw(), bytes.size()), pattern(seed));
  }
  static void expect_state_error(const std::function<void()>& call) {
    try {
      call();
      FAIL() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.category(), ErrorCategory::state);
    }
  }

  std::unique_ptr<Ranks> ranks_ = join_ranks({}, {});
  std::unique_ptr<device::Device> device_ =
      device::make_device({.kind = "host", .budget = kMiB, .compute_threads = 1});
  std::unique_ptr<device::Stream> stream_ = device_->make_stream("test");
  std::unique_ptr<Communicator> channel_ = ranks_->make_communicator(*device_);
};

TEST_F(SelfCommunicatorTest, IsRankZeroOfOne) {
  EXPECT_EQ(ranks_->kind(), "self");
  EXPECT_EQ(ranks_->rank(), 0U);
  EXPECT_EQ(ranks_->world(), 1U);
}

TEST_F(SelfCommunicatorTest, IsTheOnlyMemberOfAChannel) {
  const std::vector<std::uint32_t> alone = {0};
  EXPECT_NE(ranks_->make_channel(*device_, alone), nullptr);
  for (const std::vector<std::uint32_t>& members : {std::vector<std::uint32_t>{1}, {0, 0}}) {
    expect_state_error([&] { ranks_->make_channel(*device_, members); });
  }
}

TEST_F(SelfCommunicatorTest, GathersAndSumsAreCopies) {
  const DeviceBytes from = filled(1);
  const DeviceBytes gathered = filled(2);
  const DeviceBytes reduced = filled(3);
  const DeviceBytes scratch = filled(4);
  channel_->all_gather(*stream_, from, gathered);
  channel_->reduce_scatter(*stream_, gathered, reduced, DType::bf16, scratch);
  stream_->synchronize();
  EXPECT_TRUE(equals(from, 1));
  EXPECT_TRUE(equals(gathered, 1));
  EXPECT_TRUE(equals(reduced, 1));
}

TEST_F(SelfCommunicatorTest, InPlaceNothingChanges) {
  const DeviceBytes data = filled(1);
  const DeviceBytes scratch = filled(4);
  channel_->all_gather(*stream_, data, data);
  channel_->reduce_scatter(*stream_, data, data, DType::f32, scratch);
  channel_->all_reduce(*stream_, data, DType::f32, scratch);
  channel_->broadcast(*stream_, data, 0);
  stream_->synchronize();
  EXPECT_TRUE(equals(data, 1));
}

TEST_F(SelfCommunicatorTest, CollectivesKeepTheOrderOfTheStream) {
  const DeviceBytes data = filled(1);
  const DeviceBytes copy = filled(2);
  const auto next = pattern(3);
  channel_->all_gather(*stream_, data, copy);
  device_->copy_to_device(*stream_, data, next);
  stream_->synchronize();
  EXPECT_TRUE(equals(copy, 1));
  EXPECT_TRUE(equals(data, 3));
}

TEST_F(SelfCommunicatorTest, WrongSizesAreRefusedAtTheCall) {
  const DeviceBytes data = filled(1);
  const DeviceBytes page = data.subview(0, kPage);
  const DeviceBytes odd = data.subview(0, kPage + 64);
  const DeviceBytes none = data.subview(0, 0);
  device::Stream& stream = *stream_;
  expect_state_error([&] { channel_->all_gather(stream, page, data); });
  expect_state_error([&] { channel_->all_gather(stream, odd, odd); });
  expect_state_error([&] { channel_->reduce_scatter(stream, data, page, DType::f32, data); });
  expect_state_error([&] { channel_->reduce_scatter(stream, data, data, DType::f32, none); });
  expect_state_error([&] { channel_->all_reduce(stream, odd, DType::f32, data); });
  expect_state_error([&] { channel_->all_reduce(stream, page, DType::f32, odd.subview(0, 64)); });
  expect_state_error([&] { channel_->broadcast(stream, odd, 0); });
  expect_state_error([&] { channel_->broadcast(stream, page, 1); });
}

TEST_F(SelfCommunicatorTest, HostCollectives) {
  std::array<int, 5> from = {};
  std::iota(from.begin(), from.end(), 3);
  std::array<int, 5> to = {};
  ranks_->all_gather(std::as_bytes(std::span(from)), std::as_writable_bytes(std::span(to)));
  EXPECT_EQ(from, to);
  EXPECT_EQ(ranks_->broadcast("text"), "text");
  ranks_->barrier();
}

TEST(SelfRanks, AbortEndsTheProcessWithTheStatus) {
  const auto ranks = join_ranks({}, {});
  EXPECT_EXIT(ranks->abort(7), testing::ExitedWithCode(7), "");
}

TEST(JoinRanks, SeveralRanksWithoutAnMpiModuleAreRefused) {
  // This program is not in the folder of a module.
  if (mpi_refusal().empty()) GTEST_SKIP() << "the module is " << mpi_file();
  try {
    join_ranks({.launcher = "srun", .rank = 0, .world = 2, .local_world = 2}, {});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::comm);
    EXPECT_EQ(std::string(error.what()),
              "srun started 2 processes, but this program cannot join them: " + mpi_refusal());
  }
}

}  // namespace
}  // namespace ballast::comm::self_test
