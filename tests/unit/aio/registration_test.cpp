#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include "ballast/aio/queue.h"
#include "ballast/core/error.h"
#include "ballast/core/memory.h"

#include "tests/support/aligned_bytes.h"
#include "tests/support/captured_log.h"
#include "tests/support/temp_dir.h"

namespace ballast::aio::registration_test {
namespace {

class RegistrationTest : public testing::Test {
 protected:
  void SetUp() override {
    const auto uring = probe_backends()[0];
    if (!uring.usable) GTEST_SKIP() << uring.reason;
  }

  /// Writes `out` to the file and reads it back into `in`.
  static void round_trip(Queue& queue, const File& file, HostBytes out, HostBytes in) {
    EXPECT_TRUE(queue.wait(queue.submit({Direction::write, &file, 3 * kPage, out})).ok());
    EXPECT_TRUE(queue.wait(queue.submit({Direction::read, &file, 3 * kPage, in})).ok());
    EXPECT_TRUE(std::ranges::equal(in, out));
  }

  test::TempDir directory_;
  File file_ = File::create_anonymous(directory_.path(), kMiB, File::Access::buffered);
  File other_ = File::create_anonymous(directory_.path(), kMiB, File::Access::buffered);
  test::AlignedBytes data_{16 * kPage, 1};
};

TEST_F(RegistrationTest, RegisteredAndOtherFilesAndMemoryMix) {
  const Mapping first(32 * kPage, "test");
  const Mapping second(16 * kPage, "test");
  const auto queue = make_queue({.backend = "io_uring", .block_bytes = 3 * kPage, .depth = 4},
                                {{&file_}, {second.bytes(), first.bytes()}});
  const test::AlignedBytes elsewhere(16 * kPage);
  for (const File* file : {&file_, &other_}) {
    for (const HostBytes memory :
         {first.bytes().first(16 * kPage), second.bytes(), first.bytes().last(16 * kPage)}) {
      std::ranges::copy(data_.view(), memory.begin());
      round_trip(*queue, *file, memory, elsewhere.view());
      std::ranges::fill(memory, std::byte{0});
      round_trip(*queue, *file, data_.view(), memory);
    }
  }
}

TEST_F(RegistrationTest, ABlockAcrossTheEdgeOfRegisteredMemoryIsTransferred) {
  const Mapping pool(16 * kPage, "test");
  const HostBytes memory = pool.bytes();
  const auto queue = make_queue({.backend = "io_uring"},
                                {{}, {memory.first(5 * kPage), memory.subspan(9 * kPage)}});
  std::ranges::copy(data_.view(), memory.begin());
  const test::AlignedBytes elsewhere(16 * kPage);
  round_trip(*queue, file_, memory, elsewhere.view());
  EXPECT_TRUE(std::ranges::equal(memory, data_.view()));
}

TEST_F(RegistrationTest, ASubmittingKernelThreadGivesTheSameBytes) {
  std::unique_ptr<Queue> queue;
  try {
    queue = make_queue({.backend = "io_uring", .block_bytes = kPage, .depth = 3, .sqpoll = true});
  } catch (const Error& error) {
    GTEST_SKIP() << error.what();
  }
  const test::AlignedBytes in(16 * kPage);
  for (int i = 0; i < 50; ++i) round_trip(*queue, file_, data_.view(), in.view());
}

/// Buffered files cannot be polled on any device.
TEST_F(RegistrationTest, UnsupportedPollingIsAnErrorWithTheReason) {
  const test::CapturedLog log;
  const auto queue = make_queue({.backend = "io_uring", .depth = 2, .iopoll = true});
  for (int i = 0; i < 2; ++i) {
    const Ticket ticket = queue->submit({Direction::read, &file_, 0, data_.view()});
    EXPECT_EQ(queue->wait(ticket).error_number, EOPNOTSUPP);
  }
  EXPECT_NE(log.text().find("cannot poll for completions"), std::string::npos);
  EXPECT_EQ(std::ranges::count(log.text(), '\n'), 1);
}

#define CHECK_OR_EXIT(condition)              \
  if (!(condition)) {                         \
    std::fprintf(stderr, "%s\n", #condition); \
    std::exit(1);                             \
  }

/// Without the right to lock more memory (root has it), memory stays unregistered, one log line
/// reports it, and transfers work.
TEST_F(RegistrationTest, TheLimitOnLockedMemoryIsLoggedAndTransfersWork) {
  testing::GTEST_FLAG(death_test_style) = "threadsafe";
  const auto act = [] {
    const test::TempDir directory;
    const File file = File::create_anonymous(directory.path(), kMiB, File::Access::buffered);
    const rlimit limit{.rlim_cur = 128 * kKiB, .rlim_max = 128 * kKiB};
    CHECK_OR_EXIT(setrlimit(RLIMIT_MEMLOCK, &limit) == 0);
    constexpr uid_t kNobody = 65534;
    if (geteuid() == 0) CHECK_OR_EXIT(seteuid(kNobody) == 0);
    const test::CapturedLog log;
    const Mapping pool(4 * kMiB, "test");
    {
      const auto queue = make_queue({.backend = "io_uring", .depth = 4}, {{&file}, {pool.bytes()}});
      const auto completion =
          queue->wait(queue->submit({Direction::write, &file, 0, pool.bytes().first(kMiB)}));
      CHECK_OR_EXIT(completion.ok());
    }
    std::fprintf(stderr, "%s", log.text().c_str());
    if (geteuid() == kNobody) CHECK_OR_EXIT(seteuid(0) == 0);
  };
  EXPECT_EXIT((act(), std::exit(0)), testing::ExitedWithCode(0),
              "cannot register 4.00 MiB of buffers with io_uring.*the limit on locked memory is "
              "128 KiB; raise it \\(ulimit -l\\)");
}

}  // namespace
}  // namespace ballast::aio::registration_test
