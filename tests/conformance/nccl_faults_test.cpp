// NCCL collectives that never end, on a fake GPU.
#include <atomic>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>

#include <gtest/gtest.h>

#include "ballast/comm/communicator.h"
#include "ballast/core/error.h"

#include "src/comm/channel.h"
#include "tests/support/fake_cuda.h"
#include "tests/support/fake_nccl.h"

namespace ballast::comm::nccl_faults_test {
namespace {

using test::FakeCuda;
using test::FakeNccl;

/// More queries than any of these waits makes.
constexpr int kForever = 1000000000;

class NcclFaults : public testing::Test {
 protected:
  void SetUp() override {
    FakeCuda::busy_queries = 0;
    FakeNccl::async_error = ncclSuccess;
    FakeNccl::finalized = 0;
    FakeNccl::destroyed = 0;
    FakeNccl::aborted = 0;
  }
};

/// A rank with two channels on one stream.
struct Rank {
  explicit Rank(double timeout_seconds = 100.0)
      : ranks(join_ranks({}, {.timeout_seconds = timeout_seconds, .interrupted = &interrupted})) {}

  void gather(Communicator& channel) const { channel.all_gather(*stream, page, page); }

  std::atomic<bool> interrupted = false;
  std::unique_ptr<Ranks> ranks;
  std::unique_ptr<device::Device> device = device::make_device({.kind = "cuda", .budget = kMiB});
  std::unique_ptr<device::Stream> stream = device->make_stream("test");
  std::unique_ptr<Communicator> first = ranks->make_communicator(*device);
  std::unique_ptr<Communicator> second = ranks->make_communicator(*device);
  DeviceBytes page = device->allocate(kPage, "page");
};

void expect_error(ErrorCategory category, const std::string& text,
                  const std::function<void()>& call) {
  try {
    call();
    ADD_FAILURE() << "no error; expected " << text;
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), category);
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

TEST_F(NcclFaults, WithoutAnyChannelsAreEndedTogetherAndNotAborted) {
  {
    const Rank rank;
    rank.gather(*rank.first);
    FakeCuda::busy_queries = 100;
    rank.stream->synchronize();
    EXPECT_EQ(FakeCuda::busy_queries, 0);
  }
  EXPECT_EQ(FakeNccl::finalized, 2);
  EXPECT_EQ(FakeNccl::destroyed, 2);
  EXPECT_EQ(FakeNccl::aborted, 0);
}

TEST_F(NcclFaults, AWaitEndsWithTheTimeoutAndTakesTheOtherChannelsWithIt) {
  {
    const Rank rank(0.05);
    rank.gather(*rank.first);
    FakeCuda::busy_queries = kForever;
    expect_error(ErrorCategory::comm, "all_gather of 4.00 KiB: not all ranks took part within 50ms",
                 [&] { rank.stream->synchronize(); });
    EXPECT_EQ(FakeNccl::aborted, 1);
    FakeCuda::busy_queries = 0;
    EXPECT_NO_THROW(rank.stream->synchronize()) << "an error is thrown once";
    expect_error(ErrorCategory::comm, "aborted because another collective failed earlier",
                 [&] { rank.gather(*rank.second); });
    expect_error(ErrorCategory::comm, "aborted because another collective failed earlier",
                 [&] { rank.gather(*rank.first); });
  }
  EXPECT_EQ(FakeNccl::aborted, 2);
  EXPECT_EQ(FakeNccl::finalized, 0);
}

TEST_F(NcclFaults, AnInterruptEndsAWait) {
  Rank rank;
  rank.gather(*rank.first);
  FakeCuda::busy_queries = kForever;
  rank.interrupted = true;
  expect_error(ErrorCategory::interrupted, "interrupted in all_gather of 4.00 KiB",
               [&] { rank.stream->synchronize(); });
  EXPECT_EQ(FakeNccl::aborted, 1);
  FakeCuda::busy_queries = 0;
}

TEST_F(NcclFaults, AnAsynchronousErrorEndsAWaitAndIsReportedInOneLine) {
  const Rank rank;
  rank.gather(*rank.first);
  FakeCuda::busy_queries = kForever;
  FakeNccl::async_error = ncclRemoteError;
  expect_error(ErrorCategory::comm, "all_gather of 4.00 KiB: NCCL: a fake's error: two lines",
               [&] { rank.stream->synchronize(); });
  EXPECT_EQ(FakeNccl::aborted, 1);
  FakeCuda::busy_queries = 0;
}

TEST_F(NcclFaults, AThreadThatStartsACollectiveAndOneThatWaitsEndTogether) {
  {
    const Rank rank(0.2);
    const auto event = rank.device->make_event();
    rank.gather(*rank.first);
    event->record(*rank.stream);
    FakeCuda::busy_queries = kForever;
    FakeNccl::async_error = ncclInProgress;
    std::thread waiting([&] {
      expect_error(ErrorCategory::comm, "all_gather of 4.00 KiB: ", [&] { event->synchronize(); });
    });
    expect_error(ErrorCategory::comm,
                 "all_gather of 4.00 KiB: ", [&] { rank.gather(*rank.first); });
    waiting.join();
    EXPECT_EQ(FakeNccl::aborted, 1);
    FakeCuda::busy_queries = 0;
    FakeNccl::async_error = ncclSuccess;
  }
  EXPECT_EQ(FakeNccl::aborted, 2) << "also the other channel";
}

/// How a wait for another rank ends.
struct End {
  const char* name;
  double timeout_seconds;
  ErrorCategory category;
  const char* text;
  void (*cause)(Rank& rank);  ///< called before the wait
};

TEST_F(NcclFaults, TheWaitForAnEventEndsLikeThatForAStream) {
  const End ends[] = {
      {"timeout", 0.05, ErrorCategory::comm,
       "all_gather of 4.00 KiB: not all ranks took part within 50ms", [](Rank&) {}},
      {"interrupt", 100.0, ErrorCategory::interrupted, "interrupted in all_gather of 4.00 KiB",
       [](Rank& rank) { rank.interrupted = true; }},
      {"error", 100.0, ErrorCategory::comm, "all_gather of 4.00 KiB: NCCL: a fake's error",
       [](Rank&) { FakeNccl::async_error = ncclRemoteError; }},
      {"another channel", 100.0, ErrorCategory::comm,
       "all_gather of 4.00 KiB: aborted because another collective failed earlier: all_gather of "
       "4.00 KiB: NCCL: a fake's error",
       [](Rank& rank) {
         FakeNccl::async_error = ncclRemoteError;
         EXPECT_THROW(rank.gather(*rank.second), Error);
         FakeNccl::async_error = ncclSuccess;
       }}};
  for (const End& end : ends) {
    SCOPED_TRACE(end.name);
    Rank rank(end.timeout_seconds);
    const auto event = rank.device->make_event();
    rank.gather(*rank.first);
    event->record(*rank.stream);
    FakeCuda::busy_queries = kForever;
    end.cause(rank);
    const int aborted = FakeNccl::aborted;
    expect_error(end.category, end.text, [&] { event->synchronize(); });
    EXPECT_EQ(FakeNccl::aborted, aborted + 1);
    FakeCuda::busy_queries = 0;
    FakeNccl::async_error = ncclSuccess;
    EXPECT_NO_THROW(event->synchronize()) << "an error is thrown once";
  }
}

TEST_F(NcclFaults, AnErrorWhileAChannelIsMadeAbortsIt) {
  FakeNccl::async_error = ncclSystemError;
  expect_error(ErrorCategory::comm, "setting up a channel: NCCL: ", [] { const Rank rank; });
  EXPECT_EQ(FakeNccl::aborted, 1);
}

/// Two ranks in one process.
class Twins final : public Ranks {
 public:
  const Launch& launch() const override { return launch_; }
  std::string_view kind() const override { return "twins"; }
  std::unique_ptr<Communicator> make_channel(device::Device& device,
                                             std::span<const std::uint32_t> ranks) override {
    return make_nccl_communicator(*this, Members(ranks, rank(), world()), device,
                                  std::make_shared<CollectiveTimeout>(JoinOptions{}));
  }
  void all_gather(ConstHostBytes part, HostBytes whole) override {
    for (std::size_t i = 0; i < whole.size(); ++i) whole[i] = part[i % part.size()];
  }
  std::string broadcast(std::string text) override { return text; }
  void barrier() override {}
  void leave() override {}
  void abort(int status) override { std::exit(status); }

 private:
  Launch launch_ = {.launcher = "a test", .world = 2, .local_world = 2};
};

TEST_F(NcclFaults, TwoRanksOnOneGpuAreRefusedBeforeNcclHangs) {
  const auto device = device::make_device({.kind = "cuda", .budget = kMiB});
  expect_error(ErrorCategory::comm, "ranks 0 and 1 use the same GPU",
               [&] { Twins().make_communicator(*device); });
}

}  // namespace
}  // namespace ballast::comm::nccl_faults_test
