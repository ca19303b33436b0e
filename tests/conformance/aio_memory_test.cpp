#include <array>
#include <atomic>
#include <cerrno>
#include <optional>

#include <unistd.h>

#include "tests/conformance/aio_variants.h"

namespace ballast::aio::aio_memory_test {
namespace {

class AioMemory : public AioQueue {};

TEST_P(AioMemory, IsReturnedOnceAndBeforeWaitReturns) {
  const File& file = this->file(kMiB);
  const HostBytes bytes = memory(kMiB);
  const auto queue = this->queue(16 * kKiB, 4);
  for (int round = 0; round < 20; ++round) {
    int returned = 0;  // not atomic: the queue itself must order the two threads
    const Ticket ticket =
        queue->submit({Direction::write, &file, 0, bytes, false, [&] { ++returned; }});
    EXPECT_TRUE(queue->wait(ticket).ok());
    EXPECT_EQ(returned, 1);
  }
}

TEST_P(AioMemory, TheDestructorFinishesSubmittedRequests) {
  const File& file = this->file(4 * kMiB);
  const HostBytes out = memory(4 * kMiB, 8);
  std::atomic<int> returned = 0;
  {
    const auto queue = this->queue(32 * kKiB, 4);
    for (Bytes at = 0; at < file.size(); at += 128 * kKiB) {
      (void)queue->submit(
          {Direction::write, &file, at, out.subspan(at, 128 * kKiB), false, [&] { ++returned; }});
    }
  }
  EXPECT_EQ(returned, 32);
  const test::AlignedBytes in(4 * kMiB);
  ASSERT_EQ(pread(file.descriptor(), in.view().data(), file.size(), 0),
            static_cast<ssize_t>(file.size()));
  EXPECT_TRUE(equal(in.view(), out));
}

TEST_P(AioMemory, ReturnedMaySubmitTheNextRequest) {
  const File& file = this->file(64 * kKiB);
  const HostBytes bytes = memory(64 * kKiB, 9);
  const auto queue = this->queue(kMiB, 1);
  std::optional<Ticket> next;
  const Ticket first = queue->submit({Direction::write, &file, 0, bytes, false, [&] {
                                        next = queue->submit({Direction::read, &file, 0, bytes});
                                      }});
  EXPECT_TRUE(queue->wait(first).ok());
  ASSERT_TRUE(next.has_value());
  EXPECT_TRUE(queue->wait(*next).ok());
}

TEST_P(AioMemory, IsReturnedOnceWhenTheQueueIsCancelled) {
  constexpr std::size_t kCount = 64;
  const File& file = this->file(kCount * 64 * kKiB);
  const HostBytes bytes = memory(file.size());
  std::array<std::atomic<int>, kCount> returned{};
  int finished = 0;
  int cancelled = 0;
  {
    const auto queue = this->queue(16 * kKiB, 2);
    std::vector<Request> requests;
    for (std::size_t i = 0; i < kCount; ++i) {
      requests.push_back({Direction::write, &file, i * 64 * kKiB,
                          bytes.subspan(i * 64 * kKiB, 64 * kKiB), false,
                          [&, i] { ++returned[i]; }});
    }
    const auto tickets = queue->submit(std::span<Request>(requests));
    queue->cancel();
    const Ticket late = queue->submit({Direction::read, &file, 0, bytes.first(kPage)});
    EXPECT_EQ(queue->wait(late).error_number, ECANCELED);
    // The destructor completes the other half.
    for (std::size_t i = 0; i < kCount; i += 2) {
      const Completion completion = queue->wait(tickets[i]);
      EXPECT_EQ(returned[i], 1);
      EXPECT_TRUE(completion.ok() || completion.error_number == ECANCELED);
      (completion.ok() ? finished : cancelled) += 1;
    }
  }
  EXPECT_GT(cancelled, 0);
  EXPECT_EQ(finished + cancelled, static_cast<int>(kCount / 2));
  for (const auto& count : returned) EXPECT_EQ(count, 1);
}

INSTANTIATE_TEST_SUITE_P(Variants, AioMemory, testing::ValuesIn(all_variants()), name_of);

}  // namespace
}  // namespace ballast::aio::aio_memory_test
