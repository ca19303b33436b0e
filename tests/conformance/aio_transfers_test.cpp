#include <atomic>
#include <limits>
#include <random>
#include <thread>

#include "tests/conformance/aio_variants.h"

namespace ballast::aio::aio_transfers_test {
namespace {

class AioTransfers : public AioQueue {};

TEST_P(AioTransfers, RoundTripsOfAnySizeAndOffset) {
  const File& file = this->file(4 * kMiB);
  const HostBytes out = memory(file.size(), 1);
  const HostBytes in = memory(file.size());
  const auto queue = this->queue(64 * kKiB, 8);
  std::mt19937_64 random(7);
  const Bytes granules = file.size() / file.alignment();
  for (int round = 0; round < 40; ++round) {
    const Bytes first = random() % granules;
    const Bytes length = (1 + random() % (granules - first)) * file.alignment();
    const Bytes start = random() % (1 + granules - length / file.alignment()) * file.alignment();
    const Bytes offset = first * file.alignment();
    const HostBytes source = out.subspan(start, length);
    const Completion written = transfer(*queue, Direction::write, file, offset, source);
    ASSERT_TRUE(written.ok()) << written.error_number;
    EXPECT_EQ(written.offset, offset);
    EXPECT_EQ(written.transferred, length);
    const Completion read = transfer(*queue, Direction::read, file, offset, in.first(length));
    ASSERT_TRUE(read.ok()) << read.error_number;
    ASSERT_TRUE(equal(in.first(length), source)) << "offset " << offset << " length " << length;
  }
}

TEST_P(AioTransfers, AnEmptyRequestSucceeds) {
  const File& file = this->file(kPage);
  const auto queue = this->queue(kMiB, 1);
  EXPECT_TRUE(transfer(*queue, Direction::read, file, kPage, {}).ok());
}

TEST_P(AioTransfers, BufferedFilesTakeAnyOffsetAndLength) {
  const File& file =
      keep(File::create_anonymous(directory_.path(), 100'003, File::Access::buffered));
  const HostBytes out = memory(99'990, 5);
  const HostBytes in = memory(99'990);
  const auto queue = this->queue(10'007, 3);
  EXPECT_TRUE(transfer(*queue, Direction::write, file, 11, out.subspan(1, 99'980)).ok());
  EXPECT_TRUE(transfer(*queue, Direction::read, file, 11, in.subspan(3, 99'980)).ok());
  EXPECT_TRUE(equal(in.subspan(3, 99'980), out.subspan(1, 99'980)));
}

TEST_P(AioTransfers, BlocksLargerThanTheBytesInFlightAreTransferred) {
  const File& file = this->file(kMiB);
  const HostBytes out = memory(kMiB, 6);
  const HostBytes in = memory(kMiB);
  QueueOptions options = this->options(256 * kKiB, 8);
  options.in_flight_bytes = kPage;
  const auto queue = spoiled_queue(options, [](const Block&) { return Fault{}; });
  EXPECT_TRUE(transfer(*queue, Direction::write, file, 0, out).ok());
  EXPECT_TRUE(transfer(*queue, Direction::read, file, 0, in).ok());
  EXPECT_TRUE(equal(in, out));
}

TEST_P(AioTransfers, ASpanOfRequestsIsSubmittedInOrder) {
  constexpr std::size_t kCount = 50;
  const File& file = this->file(kCount * kPage);
  const HostBytes out = memory(file.size(), 7);
  const HostBytes in = memory(file.size());
  const auto queue = this->queue(2 * kPage, 8);
  for (const auto& [direction, bytes] :
       {std::pair(Direction::write, out), std::pair(Direction::read, in)}) {
    std::vector<Request> requests;
    for (std::size_t i = 0; i < kCount; ++i) {
      requests.push_back({direction, &file, i * kPage, bytes.subspan(i * kPage, kPage)});
    }
    const auto tickets = queue->submit(std::span<Request>(requests));
    ASSERT_EQ(tickets.size(), kCount);
    for (std::size_t i = kCount; i-- > 0;) {
      const Completion completion = queue->wait(tickets[i]);
      EXPECT_TRUE(completion.ok());
      EXPECT_EQ(completion.offset, i * kPage);
    }
  }
  EXPECT_TRUE(equal(in, out));
  EXPECT_TRUE(queue->submit(std::span<Request>()).empty());
}

TEST_P(AioTransfers, ASpanWithOneWrongRequestIsRefusedAsAWhole) {
  const File& file = this->file(4 * kPage);
  const HostBytes out = memory(2 * kPage, 8);
  const auto queue = this->queue(kMiB, 4);
  int returned = 0;
  std::vector<Request> requests;
  for (const Bytes offset : {Bytes{0}, 4 * kPage}) {
    requests.push_back(
        {Direction::write, &file, offset, out.first(kPage), false, [&] { ++returned; }});
  }
  EXPECT_THROW((void)queue->submit(std::span<Request>(requests)), Error);
  EXPECT_EQ(returned, 0);
  EXPECT_EQ(queue->counters().blocks, 0U);
}

TEST_P(AioTransfers, SeveralThreadsShareOneQueue) {
  constexpr Bytes kRegion = 512 * kKiB;
  constexpr Bytes kChunk = 16 * kKiB;
  constexpr std::uint64_t kThreads = 4;
  const File& file = this->file(kThreads * kRegion);
  const HostBytes out = memory(file.size(), 9);
  const HostBytes in = memory(file.size());
  const auto queue = this->queue(8 * kKiB, 16);
  std::atomic<int> wrong = 0;
  const auto work = [&](std::uint64_t id) {
    for (const auto& [direction, bytes] :
         {std::pair(Direction::write, out), std::pair(Direction::read, in)}) {
      std::vector<Ticket> tickets;
      for (Bytes at = id * kRegion; at < (id + 1) * kRegion; at += kChunk) {
        tickets.push_back(
            queue->submit({direction, &file, at, bytes.subspan(at, kChunk), at % 3 == 0}));
      }
      std::ranges::reverse(tickets);
      for (const Ticket ticket : tickets) wrong += queue->wait(ticket).ok() ? 0 : 1;
    }
  };
  std::vector<std::thread> threads;
  for (std::uint64_t id = 0; id < kThreads; ++id) threads.emplace_back(work, id);
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_TRUE(equal(in, out));
  EXPECT_EQ(queue->counters().bytes_written, file.size());
  EXPECT_EQ(queue->counters().bytes_read, file.size());
  EXPECT_EQ(queue->counters().blocks, 2 * file.size() / (8 * kKiB));
  EXPECT_GE(queue->counters().batches, 1U);
  EXPECT_LE(queue->counters().batches, queue->counters().blocks);
}

TEST_P(AioTransfers, RequestsThatBreakTheAlignmentAreRefused) {
  const File& file = this->file(64 * kKiB);
  if (file.alignment() == 1) GTEST_SKIP() << "this file system aligns to single bytes";
  const HostBytes memory = this->memory(16 * kKiB);
  const auto queue = this->queue(kMiB, 4);
  const auto refusal = [&](Bytes offset, HostBytes bytes) -> std::string {
    bool returned = false;
    try {
      (void)queue->submit(
          {Direction::write, &file, offset, bytes, false, [&] { returned = true; }});
    } catch (const Error& error) {
      EXPECT_EQ(error.category(), ErrorCategory::state);
      EXPECT_FALSE(returned) << "called for a request that was not taken";
      return error.what();
    }
    return "accepted";
  };
  const Bytes half = file.alignment() / 2;
  const auto has = [](const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
  };
  EXPECT_TRUE(has(refusal(half, memory.first(kPage)), "the offset is not a multiple"));
  EXPECT_TRUE(has(refusal(0, memory.first(kPage + half)), "the length is not a multiple"));
  EXPECT_TRUE(
      has(refusal(0, memory.subspan(half, kPage)), "the buffer's address is not a multiple"));
  EXPECT_TRUE(has(refusal(half, memory.first(kPage)), file.name()));
}

TEST_P(AioTransfers, RequestsOutsideTheFileAreRefused) {
  const File& file = this->file(8 * kPage);
  const HostBytes memory = this->memory(2 * kPage);
  const auto queue = this->queue(kMiB, 4);
  for (const Bytes offset : {7 * kPage, 9 * kPage, std::numeric_limits<Bytes>::max() - kPage + 1}) {
    EXPECT_THROW((void)queue->submit({Direction::read, &file, offset, memory}), Error);
  }
  EXPECT_THROW((void)queue->submit({Direction::read, nullptr, 0, memory}), Error);
}

TEST_P(AioTransfers, ACompletionHasItsDuration) {
  const File& file = this->file(kMiB);
  const HostBytes bytes = memory(kMiB);
  const auto queue = this->queue(64 * kKiB, 4);
  const auto before = std::chrono::steady_clock::now();
  const Completion completion = transfer(*queue, Direction::write, file, 0, bytes);
  const std::chrono::duration<double> outside = std::chrono::steady_clock::now() - before;
  EXPECT_GT(completion.seconds, 0.0);
  EXPECT_LE(completion.seconds, outside.count());
}

INSTANTIATE_TEST_SUITE_P(Variants, AioTransfers, testing::ValuesIn(all_variants()), name_of);

}  // namespace
}  // namespace ballast::aio::aio_transfers_test
