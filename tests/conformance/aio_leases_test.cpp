#include <array>
#include <atomic>
#include <cerrno>
#include <optional>

#include <unistd.h>

#include "tests/conformance/aio_variants.h"

namespace ballast::aio {
namespace {

class AioLeases : public AioQueue {};

TEST_P(AioLeases, EndOnceAndBeforeWaitReturns) {
  const File& file = this->file(kMiB);
  const HostBytes bytes = memory(kMiB);
  const auto queue = this->queue(16 * kKiB, 4);
  for (int round = 0; round < 20; ++round) {
    int released = 0;  // no atomic: the queue itself must order the two threads
    const Ticket ticket =
        queue->submit({Direction::write, &file, 0, Lease(bytes, [&] { ++released; })});
    EXPECT_TRUE(queue->wait(ticket).ok());
    EXPECT_EQ(released, 1);
  }
}

TEST_P(AioLeases, TheDestructorFinishesWhatWasSubmitted) {
  const File& file = this->file(4 * kMiB);
  const HostBytes out = memory(4 * kMiB, 8);
  std::atomic<int> released = 0;
  {
    const auto queue = this->queue(32 * kKiB, 4);
    for (Bytes at = 0; at < file.size(); at += 128 * kKiB) {
      (void)queue->submit(
          {Direction::write, &file, at, Lease(out.subspan(at, 128 * kKiB), [&] { ++released; })});
    }
  }
  EXPECT_EQ(released, 32);
  const test::AlignedBytes in(4 * kMiB);
  ASSERT_EQ(pread(file.descriptor(), in.view().data(), file.size(), 0),
            static_cast<ssize_t>(file.size()));
  EXPECT_TRUE(equal(in.view(), out));
}

TEST_P(AioLeases, OneThatEndsMaySubmitTheNextRequest) {
  const File& file = this->file(64 * kKiB);
  const HostBytes bytes = memory(64 * kKiB, 9);
  const auto queue = this->queue(kMiB, 1);
  std::optional<Ticket> next;
  const Ticket first =
      queue->submit({Direction::write, &file, 0, Lease(bytes, [&] {
                       next = queue->submit({Direction::read, &file, 0, Lease(bytes)});
                     })});
  EXPECT_TRUE(queue->wait(first).ok());
  ASSERT_TRUE(next.has_value());
  EXPECT_TRUE(queue->wait(*next).ok());
}

TEST_P(AioLeases, EndOnceWhenTheQueueIsCancelled) {
  constexpr std::size_t kCount = 64;
  const File& file = this->file(kCount * 64 * kKiB);
  const HostBytes bytes = memory(file.size());
  std::array<std::atomic<int>, kCount> released{};
  int finished = 0;
  int cancelled = 0;
  {
    const auto queue = this->queue(16 * kKiB, 2);
    std::vector<Request> requests;
    for (std::size_t i = 0; i < kCount; ++i) {
      requests.push_back(
          {Direction::write, &file, i * 64 * kKiB,
           Lease(bytes.subspan(i * 64 * kKiB, 64 * kKiB), [&, i] { ++released[i]; })});
    }
    const auto tickets = queue->submit(std::span<Request>(requests));
    queue->cancel();
    const Ticket late = queue->submit({Direction::read, &file, 0, Lease(bytes.first(kPage))});
    EXPECT_EQ(queue->wait(late).error_number, ECANCELED);
    // The other half is left to the destructor.
    for (std::size_t i = 0; i < kCount; i += 2) {
      const Completion completion = queue->wait(tickets[i]);
      EXPECT_EQ(released[i], 1);
      EXPECT_TRUE(completion.ok() || completion.error_number == ECANCELED);
      (completion.ok() ? finished : cancelled) += 1;
    }
  }
  EXPECT_GT(cancelled, 0);
  EXPECT_EQ(finished + cancelled, static_cast<int>(kCount / 2));
  for (const auto& count : released) EXPECT_EQ(count, 1);
}

INSTANTIATE_TEST_SUITE_P(Variants, AioLeases, testing::ValuesIn(all_variants()), name_of);

}  // namespace
}  // namespace ballast::aio
