#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <unistd.h>

#include "ballast/core/error.h"

#include "aio/backends.h"
#include "aio/block_queue.h"
#include "aio/faults/faulty_transport.h"
#include "tests/support/aligned_bytes.h"
#include "tests/support/direct_io.h"
#include "tests/support/temp_dir.h"

namespace ballast::aio {
namespace {

using test::AlignedBytes;
using test::TempDir;

/// A backend, alone or behind a transport that spoils blocks in every way that a queue must mend.
struct Variant {
  std::string backend;
  bool faulty = false;
};

void PrintTo(const Variant& variant, std::ostream* out) {
  *out << variant.backend << (variant.faulty ? " over a faulty transport" : "");
}

class AioQueue : public testing::TestWithParam<Variant> {
 protected:
  void SetUp() override {
    for (const Backend& backend : probe_backends()) {
      if (backend.name == GetParam().backend && !backend.usable) GTEST_SKIP() << backend.reason;
    }
    if (!test::has_direct_io(directory_.path())) {
      GTEST_SKIP() << directory_.path() << " has no direct I/O; set TMPDIR to a place that has";
    }
  }

  [[nodiscard]] static std::unique_ptr<Transport> transport(unsigned depth) {
    return GetParam().backend == "io_uring" ? make_uring_transport(depth)
                                            : make_thread_transport(depth);
  }

  /// The queue under test.
  [[nodiscard]] static std::unique_ptr<Queue> queue(Bytes block_bytes, unsigned depth) {
    if (!GetParam().faulty) {
      return make_queue(
          {.backend = GetParam().backend, .block_bytes = block_bytes, .depth = depth});
    }
    return spoiled_queue(block_bytes, depth, [random = std::mt19937_64(1)](const Block&) mutable {
      Fault fault;
      const auto die = random() % 16;
      if (die == 0) fault.error_number = EINTR;
      if (die == 1) fault.error_number = EAGAIN;
      if (die < 6) fault.at_most = kPage + random() % (2 * kPage);
      fault.held_back = random() % 4;
      return fault;
    });
  }

  /// A queue whose blocks suffer `plan`.
  [[nodiscard]] static std::unique_ptr<Queue> spoiled_queue(Bytes block_bytes, unsigned depth,
                                                            FaultyTransport::Plan plan) {
    return std::make_unique<BlockQueue>(
        GetParam().backend, QueueOptions{.block_bytes = block_bytes, .depth = depth},
        [&plan](unsigned blocks) {
          return std::make_unique<FaultyTransport>(transport(blocks), std::move(plan));
        });
  }

  [[nodiscard]] File file(Bytes size) const {
    return File::create_anonymous(directory_.path(), size);
  }

  TempDir directory_;
};

/// Faults that each test chooses itself, over each backend.
class AioQueueFaults : public AioQueue {};

Completion transfer(Queue& queue, Direction direction, const File& file, Bytes offset,
                    HostBytes bytes) {
  return queue.wait(queue.submit({direction, &file, offset, Lease(bytes)}));
}

bool equal(HostBytes a, HostBytes b) {
  return std::ranges::equal(a, b);
}

TEST_P(AioQueue, RoundTripsOfAnySizeAndOffset) {
  const File file = this->file(4 * kMiB);
  const auto queue = this->queue(64 * kKiB, 8);
  std::mt19937_64 random(7);
  const Bytes granules = file.size() / file.alignment();
  for (int round = 0; round < 50; ++round) {
    const Bytes first = random() % granules;
    const Bytes length = (1 + random() % (granules - first)) * file.alignment();
    const AlignedBytes out(length, random());
    const AlignedBytes in(length);
    const Bytes offset = first * file.alignment();
    const Completion written = transfer(*queue, Direction::write, file, offset, out.view());
    ASSERT_TRUE(written.ok()) << written.error_number;
    EXPECT_EQ(written.offset, offset);
    EXPECT_EQ(written.transferred, length);
    const Completion read = transfer(*queue, Direction::read, file, offset, in.view());
    ASSERT_TRUE(read.ok()) << read.error_number;
    ASSERT_TRUE(equal(in.view(), out.view())) << "offset " << offset << " length " << length;
  }
}

TEST_P(AioQueue, AnEmptyRequestSucceeds) {
  const File file = this->file(kPage);
  const auto queue = this->queue(kMiB, 1);
  EXPECT_TRUE(transfer(*queue, Direction::read, file, kPage, {}).ok());
}

TEST_P(AioQueue, BufferedFilesTakeAnyOffsetAndLength) {
  const File file = File::create_anonymous(directory_.path(), 100'003, File::Access::buffered);
  const auto queue = this->queue(10'007, 3);
  const AlignedBytes out(99'990, 5);
  const AlignedBytes in(99'990);
  EXPECT_TRUE(transfer(*queue, Direction::write, file, 11, out.view(1, 99'980)).ok());
  EXPECT_TRUE(transfer(*queue, Direction::read, file, 11, in.view(3, 99'980)).ok());
  EXPECT_TRUE(equal(in.view(3, 99'980), out.view(1, 99'980)));
}

TEST_P(AioQueue, SeveralThreadsShareOneQueue) {
  constexpr Bytes kRegion = 512 * kKiB;
  constexpr Bytes kChunk = 16 * kKiB;
  const File file = this->file(4 * kRegion);
  const auto queue = this->queue(8 * kKiB, 16);
  std::atomic<int> wrong = 0;
  const auto work = [&](std::uint64_t id) {
    const AlignedBytes out(kRegion, id);
    const AlignedBytes in(kRegion);
    for (const auto& [direction, memory] :
         {std::pair(Direction::write, out.view()), std::pair(Direction::read, in.view())}) {
      std::vector<Ticket> tickets;
      for (Bytes at = 0; at < kRegion; at += kChunk) {
        tickets.push_back(queue->submit(
            {direction, &file, id * kRegion + at, Lease(memory.subspan(at, kChunk))}));
      }
      std::ranges::reverse(tickets);
      for (const Ticket ticket : tickets) wrong += queue->wait(ticket).ok() ? 0 : 1;
    }
    wrong += equal(in.view(), out.view()) ? 0 : 1;
  };
  std::vector<std::thread> threads;
  for (std::uint64_t id = 0; id < 4; ++id) threads.emplace_back(work, id);
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(queue->counters().bytes_written, file.size());
  EXPECT_EQ(queue->counters().bytes_read, file.size());
  EXPECT_EQ(queue->counters().blocks, 2 * file.size() / (8 * kKiB));
}

TEST_P(AioQueue, RequestsThatBreakTheAlignmentAreRefused) {
  const File file = this->file(64 * kKiB);
  if (file.alignment() == 1) GTEST_SKIP() << "this file system aligns to single bytes";
  const auto queue = this->queue(kMiB, 4);
  const AlignedBytes memory(16 * kKiB);
  const auto refusal = [&](Bytes offset, HostBytes bytes) -> std::string {
    bool released = false;
    try {
      (void)queue->submit(
          {Direction::write, &file, offset, Lease(bytes, [&] { released = true; })});
    } catch (const Error& error) {
      EXPECT_EQ(error.category(), ErrorCategory::state);
      EXPECT_TRUE(released);
      return error.what();
    }
    return "accepted";
  };
  const Bytes half = file.alignment() / 2;
  const auto has = [](const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
  };
  EXPECT_TRUE(has(refusal(half, memory.view(0, kPage)), "the offset is no multiple"));
  EXPECT_TRUE(has(refusal(0, memory.view(0, kPage + half)), "the length is no multiple"));
  EXPECT_TRUE(has(refusal(0, memory.view(half, kPage)), "the buffer's address is no multiple"));
  EXPECT_TRUE(has(refusal(half, memory.view(0, kPage)), file.name()));
}

TEST_P(AioQueue, RequestsOutsideTheFileAreRefused) {
  const File file = this->file(8 * kPage);
  const auto queue = this->queue(kMiB, 4);
  const AlignedBytes memory(2 * kPage);
  for (const Bytes offset : {7 * kPage, 9 * kPage, std::numeric_limits<Bytes>::max() - kPage + 1}) {
    EXPECT_THROW((void)queue->submit({Direction::read, &file, offset, Lease(memory.view())}),
                 Error);
  }
  EXPECT_THROW((void)queue->submit({Direction::read, nullptr, 0, Lease(memory.view())}), Error);
}

TEST_P(AioQueue, ReadingPastTheEndIsAnIoError) {
  const auto path = directory_.write("shrinks", std::string(16 * kKiB, 'x'));
  const File file = File::open(path, false);
  std::filesystem::resize_file(path, 8 * kKiB + 100);
  for (const Bytes block_bytes : {4 * kKiB, kMiB}) {
    const auto queue = this->queue(block_bytes, 4);
    const AlignedBytes memory(16 * kKiB);
    const Completion completion = transfer(*queue, Direction::read, file, 0, memory.view());
    EXPECT_EQ(completion.error_number, EIO);
    EXPECT_EQ(completion.transferred, 8 * kKiB);
    EXPECT_FALSE(completion.ok());
  }
}

TEST_P(AioQueue, WritingToAFileOpenedForReadingFails) {
  const auto path = directory_.write("locked", std::string(kPage, 'x'));
  const File file = File::open(path, false);
  const auto queue = this->queue(kMiB, 4);
  const AlignedBytes memory(kPage);
  const Completion completion = transfer(*queue, Direction::write, file, 0, memory.view());
  EXPECT_EQ(completion.error_number, EBADF);
  EXPECT_EQ(completion.transferred, 0U);
}

TEST_P(AioQueueFaults, ShortTransfersAreContinued) {
  const File file = this->file(kMiB);
  const auto queue = spoiled_queue(256 * kKiB, 2, [](const Block&) {
    return Fault{.at_most = 100 * kKiB + 100};  // ends inside a granule
  });
  const AlignedBytes out(kMiB, 3);
  const AlignedBytes in(kMiB);
  EXPECT_TRUE(transfer(*queue, Direction::write, file, 0, out.view()).ok());
  EXPECT_TRUE(transfer(*queue, Direction::read, file, 0, in.view()).ok());
  EXPECT_TRUE(equal(in.view(), out.view()));
  EXPECT_EQ(queue->counters().blocks, 8U);
  EXPECT_EQ(queue->counters().continued, 16U);
  EXPECT_EQ(queue->counters().bytes_written, kMiB);
  EXPECT_EQ(queue->counters().bytes_read, kMiB);
}

TEST_P(AioQueueFaults, InterruptionsAndRefusalsAreRetried) {
  const File file = this->file(kMiB);
  const auto queue = spoiled_queue(64 * kKiB, 4, [n = 0](const Block&) mutable {
    const std::array<int, 4> errors = {EINTR, EAGAIN, EAGAIN, 0};
    return Fault{.error_number = errors[static_cast<std::size_t>(n++) % errors.size()]};
  });
  const AlignedBytes out(kMiB, 4);
  const AlignedBytes in(kMiB);
  EXPECT_TRUE(transfer(*queue, Direction::write, file, 0, out.view()).ok());
  EXPECT_TRUE(transfer(*queue, Direction::read, file, 0, in.view()).ok());
  EXPECT_TRUE(equal(in.view(), out.view()));
  EXPECT_EQ(queue->counters().continued, 0U);
}

TEST_P(AioQueueFaults, AFailedBlockFailsItsRequestOnceAndNoOther) {
  for (const int error_number : {EIO, ENOSPC}) {
    const File file = this->file(kMiB);
    const auto queue = spoiled_queue(64 * kKiB, 4, [&](const Block& block) {
      const bool hit = block.direction == Direction::write && block.offset == 320 * kKiB;
      return Fault{.error_number = hit ? error_number : 0, .held_back = hit ? 2U : 0U};
    });
    const AlignedBytes memory(512 * kKiB, 5);
    int released = 0;
    const Ticket bad = queue->submit(
        {Direction::write, &file, 64 * kKiB, Lease(memory.view(), [&] { ++released; })});
    const AlignedBytes other(64 * kKiB, 6);
    const Ticket good = queue->submit({Direction::write, &file, 960 * kKiB, Lease(other.view())});
    const Completion completion = queue->wait(bad);
    EXPECT_EQ(released, 1);
    EXPECT_EQ(completion.error_number, error_number);
    EXPECT_EQ(completion.offset, 64 * kKiB);
    EXPECT_EQ(completion.length, 512 * kKiB);
    EXPECT_LT(completion.transferred, 512 * kKiB);
    try {
      completion.check("writeback");
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.category(), ErrorCategory::io);
      EXPECT_EQ(error.error_number(), error_number);
      EXPECT_EQ(error.what(), "writeback: write " + directory_.path().string() +
                                  " offset=65536 length=524288: " + std::strerror(error_number));
    }
    EXPECT_THROW((void)queue->wait(bad), Error);
    EXPECT_TRUE(queue->wait(good).ok());
    EXPECT_EQ(released, 1);
  }
}

TEST_P(AioQueue, TheLeaseEndsOnceAndBeforeWaitReturns) {
  const File file = this->file(kMiB);
  const auto queue = this->queue(16 * kKiB, 4);
  const AlignedBytes memory(kMiB);
  for (int round = 0; round < 20; ++round) {
    int released = 0;  // no atomic: the queue itself must order the two threads
    const Ticket ticket =
        queue->submit({Direction::write, &file, 0, Lease(memory.view(), [&] { ++released; })});
    EXPECT_TRUE(queue->wait(ticket).ok());
    EXPECT_EQ(released, 1);
  }
}

TEST_P(AioQueue, TheDestructorFinishesWhatWasSubmitted) {
  const File file = this->file(4 * kMiB);
  const AlignedBytes out(4 * kMiB, 8);
  std::atomic<int> released = 0;
  {
    const auto queue = this->queue(32 * kKiB, 4);
    for (Bytes at = 0; at < file.size(); at += 128 * kKiB) {
      (void)queue->submit(
          {Direction::write, &file, at, Lease(out.view(at, 128 * kKiB), [&] { ++released; })});
    }
  }
  EXPECT_EQ(released, 32);
  const AlignedBytes in(4 * kMiB);
  ASSERT_EQ(pread(file.descriptor(), in.view().data(), file.size(), 0),
            static_cast<ssize_t>(file.size()));
  EXPECT_TRUE(equal(in.view(), out.view()));
}

TEST_P(AioQueue, ALeaseMaySubmitTheNextRequestWhenItEnds) {
  const File file = this->file(64 * kKiB);
  const auto queue = this->queue(kMiB, 1);
  const AlignedBytes memory(64 * kKiB, 9);
  std::optional<Ticket> next;
  const Ticket first =
      queue->submit({Direction::write, &file, 0, Lease(memory.view(), [&] {
                       next = queue->submit({Direction::read, &file, 0, Lease(memory.view())});
                     })});
  EXPECT_TRUE(queue->wait(first).ok());
  ASSERT_TRUE(next.has_value());
  EXPECT_TRUE(queue->wait(*next).ok());
}

/// Random transfers, several in flight on ranges that do not overlap, beside a copy of the file in
/// memory.
TEST_P(AioQueue, RandomOperationsAgreeWithAModelOfTheFile) {
  constexpr int kOperations = 20'000;
  constexpr Bytes kSize = 256 * kKiB;
  const File file = this->file(kSize);
  const auto queue = this->queue(8 * kKiB, 8);
  std::vector<std::byte> model(kSize);
  struct InFlight {
    Direction direction;
    Bytes offset;
    AlignedBytes memory;
    Ticket ticket;
  };
  std::vector<InFlight> in_flight;
  std::mt19937_64 random(11);
  const auto finish = [&](std::size_t index) {
    const InFlight done = std::move(in_flight[index]);
    in_flight.erase(in_flight.begin() + static_cast<std::ptrdiff_t>(index));
    const Completion completion = queue->wait(done.ticket);
    ASSERT_TRUE(completion.ok()) << completion.error_number;
    if (done.direction == Direction::write) return;
    ASSERT_TRUE(std::ranges::equal(done.memory.view(),
                                   HostBytes(model).subspan(done.offset, completion.length)))
        << "offset " << done.offset << " length " << completion.length;
  };
  for (int operation = 0; operation < kOperations && !HasFatalFailure(); ++operation) {
    const Bytes granules = kSize / file.alignment();
    const Bytes first = random() % granules;
    const Bytes count = 1 + random() % std::min<Bytes>(granules - first, 48);
    const Bytes offset = first * file.alignment();
    const Bytes length = std::min(count * file.alignment(), kSize - offset);
    for (std::size_t i = in_flight.size(); i-- > 0;) {
      const auto& other = in_flight[i];
      if (other.offset < offset + length && offset < other.offset + other.memory.view().size()) {
        finish(i);
      }
    }
    while (in_flight.size() >= 6) finish(random() % in_flight.size());
    const auto direction = random() % 2 == 0 ? Direction::read : Direction::write;
    AlignedBytes memory(length);
    if (direction == Direction::write) {
      for (std::size_t i = 0; i + 8 <= length; i += 8) {
        const std::uint64_t word = random();
        std::memcpy(memory.view().data() + i, &word, 8);
      }
      std::ranges::copy(memory.view(), model.begin() + static_cast<std::ptrdiff_t>(offset));
    }
    const HostBytes bytes = memory.view();
    const Ticket ticket = queue->submit({direction, &file, offset, Lease(bytes)});
    in_flight.push_back({direction, offset, std::move(memory), ticket});
  }
  while (!in_flight.empty() && !HasFatalFailure()) finish(in_flight.size() - 1);
}

INSTANTIATE_TEST_SUITE_P(Backends, AioQueue,
                         testing::Values(Variant{"io_uring"}, Variant{"threads"},
                                         Variant{"io_uring", true}, Variant{"threads", true}),
                         [](const auto& info) {
                           return info.param.backend + (info.param.faulty ? "_faulty" : "");
                         });
INSTANTIATE_TEST_SUITE_P(Backends, AioQueueFaults,
                         testing::Values(Variant{"io_uring"}, Variant{"threads"}),
                         [](const auto& info) { return info.param.backend; });

}  // namespace
}  // namespace ballast::aio
