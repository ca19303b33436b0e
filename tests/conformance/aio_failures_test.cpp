#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "tests/conformance/aio_variants.h"

namespace ballast::aio::aio_failures_test {
namespace {

std::string message_of(const Completion& completion) {
  try {
    completion.check("writeback");
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::io);
    return error.what();
  }
  return "no error";
}

/// Failures that occur without injected faults, in every variant.
class AioFailures : public AioQueue {};

TEST_P(AioFailures, ReadingPastTheEndOfATruncatedFileSaysSo) {
  const auto path = directory_.write("shrinks", std::string(16 * kKiB, 'x'));
  const File& file = keep(File::open(path, false));
  const HostBytes bytes = memory(16 * kKiB);
  std::filesystem::resize_file(path, 8 * kKiB + 100);
  for (const Bytes block_bytes : {4 * kKiB, kMiB}) {
    const auto queue = this->queue(block_bytes, 4);
    const Completion completion = transfer(*queue, Direction::read, file, 0, bytes);
    EXPECT_EQ(completion.error_number, EIO);
    EXPECT_TRUE(completion.end_of_file);
    EXPECT_LE(completion.transferred, 8 * kKiB);
    EXPECT_FALSE(completion.ok());
    EXPECT_EQ(message_of(completion),
              "writeback: read " + path.string() +
                  " offset=0 length=16384: the file ends inside this range; it was truncated");
  }
}

TEST_P(AioFailures, WritingToAFileOpenedForReadingFails) {
  const auto path = directory_.write("locked", std::string(kPage, 'x'));
  const File& file = keep(File::open(path, false));
  const HostBytes bytes = memory(kPage);
  const auto queue = this->queue(kMiB, 4);
  const Completion completion = transfer(*queue, Direction::write, file, 0, bytes);
  EXPECT_EQ(completion.error_number, EBADF);
  EXPECT_FALSE(completion.end_of_file);
  EXPECT_EQ(completion.transferred, 0U);
}

INSTANTIATE_TEST_SUITE_P(Variants, AioFailures, testing::ValuesIn(all_variants()), name_of);

/// Faults that a test injects itself.
class AioFaults : public AioQueue {};

TEST_P(AioFaults, ShortTransfersAreContinued) {
  const File& file = this->file(kMiB);
  const HostBytes out = memory(kMiB, 3);
  const HostBytes in = memory(kMiB);
  const auto queue = spoiled_queue(256 * kKiB, 2, [](const Block&) {
    return Fault{.at_most = 100 * kKiB + 100};  // ends inside a granule
  });
  EXPECT_TRUE(transfer(*queue, Direction::write, file, 0, out).ok());
  EXPECT_TRUE(transfer(*queue, Direction::read, file, 0, in).ok());
  EXPECT_TRUE(equal(in, out));
  EXPECT_EQ(queue->counters().blocks, 8U);
  EXPECT_EQ(queue->counters().continued, 16U);
  EXPECT_EQ(queue->counters().bytes_written, kMiB);
  EXPECT_EQ(queue->counters().bytes_read, kMiB);
}

TEST_P(AioFaults, InterruptionsAndRefusalsAreRetried) {
  const File& file = this->file(kMiB);
  const HostBytes out = memory(kMiB, 4);
  const HostBytes in = memory(kMiB);
  const auto queue = spoiled_queue(64 * kKiB, 4, [n = 0](const Block&) mutable {
    const std::array<int, 4> errors = {EINTR, EAGAIN, EAGAIN, 0};
    return Fault{.error_number = errors[static_cast<std::size_t>(n++) % errors.size()]};
  });
  EXPECT_TRUE(transfer(*queue, Direction::write, file, 0, out).ok());
  EXPECT_TRUE(transfer(*queue, Direction::read, file, 0, in).ok());
  EXPECT_TRUE(equal(in, out));
  EXPECT_EQ(queue->counters().continued, 0U);
}

TEST_P(AioFaults, AFailedBlockFailsItsRequestOnceAndNoOther) {
  const File& file = this->file(kMiB);
  const HostBytes bytes = memory(512 * kKiB, 5);
  const HostBytes other = memory(64 * kKiB, 6);
  for (const int error_number : {EIO, ENOSPC}) {
    const auto queue = spoiled_queue(64 * kKiB, 4, [&](const Block& block) {
      const bool hit = block.direction == Direction::write && block.offset == 320 * kKiB;
      return Fault{.error_number = hit ? error_number : 0, .held_back = hit ? 2U : 0U};
    });
    int returned = 0;
    const Ticket bad =
        queue->submit({Direction::write, &file, 64 * kKiB, bytes, false, [&] { ++returned; }});
    const Ticket good = queue->submit({Direction::write, &file, 960 * kKiB, other});
    const Completion completion = queue->wait(bad);
    EXPECT_EQ(returned, 1);
    EXPECT_EQ(completion.error_number, error_number);
    EXPECT_EQ(completion.offset, 64 * kKiB);
    EXPECT_EQ(completion.length, 512 * kKiB);
    EXPECT_LT(completion.transferred, 512 * kKiB);
    EXPECT_EQ(message_of(completion),
              "writeback: write " + directory_.path().string() +
                  " offset=65536 length=524288: " + std::strerror(error_number));
    EXPECT_THROW((void)queue->wait(bad), Error);
    EXPECT_TRUE(queue->wait(good).ok());
    EXPECT_EQ(returned, 1);
  }
}

TEST_P(AioFaults, SilentCorruptionIsReportedAsSuccess) {
  const File& file = this->file(16 * kPage);
  const HostBytes out = memory(file.size(), 7);
  const HostBytes in = memory(file.size());
  for (const std::string plan : {"flip:times=1", "torn:times=1:after=1", "lost:times=1:after=1"}) {
    {
      const auto clean = spoiled_queue(4 * kPage, 4, [](const Block&) { return Fault{}; });
      std::ranges::fill(in, std::byte{0});
      EXPECT_TRUE(transfer(*clean, Direction::write, file, 0, in).ok());
    }
    const auto queue = spoiled_queue(4 * kPage, 4, FaultPlan(plan));
    EXPECT_TRUE(transfer(*queue, Direction::write, file, 0, out).ok());
    EXPECT_TRUE(transfer(*queue, Direction::read, file, 0, in).ok());
    EXPECT_FALSE(equal(in, out)) << plan;
  }
}

TEST_P(AioFaults, AHungDeviceIsAbandonedAndTheQueueDestroyed) {
  const File& file = this->file(16 * kPage);
  const HostBytes bytes = memory(2 * kPage);
  const HostBytes other = memory(2 * kPage);
  std::atomic<int> returned = 0;
  {
    QueueOptions options = this->options(kPage, 4);
    options.stall_seconds = 0.05;
    options.abandon_seconds = 3;  // on a busy disk, what must succeed here may take a second
    const auto queue = spoiled_queue(options, FaultPlan("hang:on=write:times=1"));
    const Ticket hung =
        queue->submit({Direction::write, &file, 0, bytes, false, [&] { ++returned; }});
    EXPECT_TRUE(transfer(*queue, Direction::read, file, 0, other).ok());
    const Completion completion = queue->wait(hung);
    EXPECT_EQ(completion.error_number, ETIMEDOUT);
    EXPECT_GE(completion.seconds, options.abandon_seconds);
    EXPECT_NE(message_of(completion).find("no answer from the device"), std::string::npos);
    EXPECT_TRUE(transfer(*queue, Direction::write, file, 8 * kPage, other).ok());
  }
  EXPECT_EQ(returned, 0);
}

INSTANTIATE_TEST_SUITE_P(Variants, AioFaults, testing::ValuesIn(bare_variants()), name_of);

}  // namespace
}  // namespace ballast::aio::aio_failures_test
