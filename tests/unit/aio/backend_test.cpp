#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/aio/queue.h"
#include "ballast/core/error.h"

#include "tests/support/aligned_bytes.h"
#include "tests/support/captured_log.h"
#include "tests/support/deny_syscall.h"
#include "tests/support/temp_dir.h"

namespace ballast::aio::backend_test {
namespace {

/// Sets BALLAST_IO_DISABLE during its lifetime.
class Disable {
 public:
  explicit Disable(const char* name) { setenv("BALLAST_IO_DISABLE", name, 1); }
  ~Disable() { unsetenv("BALLAST_IO_DISABLE"); }
  Disable(const Disable&) = delete;
  Disable& operator=(const Disable&) = delete;
};

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// The error that make_queue throws for a backend's name, or "none".
std::pair<std::string, ErrorCategory> refusal(const std::string& name) {
  try {
    (void)make_queue({.backend = name});
  } catch (const Error& error) {
    return {error.what(), error.category()};
  }
  return {"none", ErrorCategory::usage};
}

TEST(Backends, ProbesDescribeEachBackend) {
  const auto backends = probe_backends();
  ASSERT_EQ(backends.size(), 3U);
  EXPECT_EQ(backends[0].name, "io_uring");
  EXPECT_EQ(backends[1].name, "threads");
  EXPECT_EQ(backends[2].name, "null");
  EXPECT_TRUE(backends[1].usable && backends[2].usable);
  for (const auto& backend : backends) EXPECT_FALSE(backend.reason.empty()) << backend.name;
  if (backends[0].usable) {
    EXPECT_EQ(backends[0].reason.rfind("kernel ", 0), 0U) << backends[0].reason;
  }
}

TEST(Backends, AutoTakesTheFirstUsableOne) {
  const auto backends = probe_backends();
  const auto queue = make_queue({});
  EXPECT_EQ(queue->backend(), backends[0].usable ? "io_uring" : "threads");
}

TEST(Backends, AutoFallsBackAndLogsWhy) {
  const Disable disable("io_uring");
  const test::CapturedLog log;
  EXPECT_EQ(make_queue({})->backend(), "threads");
  EXPECT_TRUE(has(log.text(), "using threads because io_uring is not usable")) << log.text();
  EXPECT_TRUE(has(log.text(), "BALLAST_IO_DISABLE")) << log.text();
}

TEST(Backends, AutoNeverTakesTheNullBackend) {
  setenv("BALLAST_IO_DISABLE", "io_uring,threads", 1);
  const auto [message, category] = refusal("auto");
  unsetenv("BALLAST_IO_DISABLE");
  EXPECT_EQ(category, ErrorCategory::io);
  EXPECT_TRUE(has(message, "no aio backend is usable")) << message;
}

TEST(Backends, TheNullBackendCompletesWithoutMovingData) {
  const test::TempDir directory;
  const File file = File::create_anonymous(directory.path(), kMiB, File::Access::buffered);
  const auto queue = make_queue({.backend = "null", .block_bytes = 64 * kKiB, .depth = 3});
  const test::AlignedBytes memory(kMiB, 1);
  const test::AlignedBytes before(kMiB, 1);
  for (const auto direction : {Direction::write, Direction::read}) {
    EXPECT_TRUE(queue->wait(queue->submit({direction, &file, 0, memory.view()})).ok());
  }
  EXPECT_TRUE(std::ranges::equal(memory.view(), before.view()));
  EXPECT_EQ(queue->counters().blocks, 32U);
}

TEST(Backends, ANamedBackendThatIsNotUsableIsAnIoError) {
  const Disable disable("io_uring");
  const test::CapturedLog log;
  const auto [message, category] = refusal("io_uring");
  EXPECT_EQ(category, ErrorCategory::io);
  EXPECT_TRUE(has(message, "io_uring is not usable here: disabled by")) << message;
  EXPECT_EQ(log.text(), "");
}

TEST(Backends, DisablingOneLeavesTheOthers) {
  const Disable disable("threads");
  EXPECT_FALSE(probe_backends()[1].usable);
  EXPECT_TRUE(has(refusal("threads").first, "disabled by"));
}

TEST(Backends, AWrongNameIsAConfigErrorWithASuggestion) {
  const auto [message, category] = refusal("iouring");
  EXPECT_EQ(category, ErrorCategory::config);
  EXPECT_EQ(message,
            "there is no aio backend 'iouring' (did you mean 'io_uring'?); choose one of auto, "
            "io_uring, threads, null");
}

#define CHECK_OR_EXIT(condition)              \
  if (!(condition)) {                         \
    std::fprintf(stderr, "%s\n", #condition); \
    std::exit(1);                             \
  }

class Sandbox : public testing::Test {
 protected:
  void SetUp() override {
    testing::GTEST_FLAG(death_test_style) = "threadsafe";
    const auto uring = probe_backends()[0];
    if (!uring.usable) GTEST_SKIP() << uring.reason;
    if (!test::can_deny_syscalls()) GTEST_SKIP() << "no seccomp filters here";
  }
};

TEST_F(Sandbox, DenyingIoUringCausesAFallback) {
  const auto act = [] {
    CHECK_OR_EXIT(test::deny_syscall(SYS_io_uring_setup, EPERM));
    const auto uring = probe_backends()[0];
    CHECK_OR_EXIT(!uring.usable);
    CHECK_OR_EXIT(has(uring.reason, "denied by seccomp or kernel.io_uring_disabled"));
    CHECK_OR_EXIT(make_queue({})->backend() == "threads");
    std::exit(0);
  };
  EXPECT_EXIT(act(), testing::ExitedWithCode(0), "");
}

TEST_F(Sandbox, DenyingIoUringDuringARunGivesErrorsInsteadOfHanging) {
  const auto act = [] {
    const test::TempDir directory;
    const File file = File::create_anonymous(directory.path(), kMiB, File::Access::buffered);
    const test::AlignedBytes memory(kMiB);
    const auto queue = make_queue({.backend = "io_uring", .block_bytes = 64 * kKiB, .depth = 4});
    const auto write = [&] {
      return queue->wait(queue->submit({Direction::write, &file, 0, memory.view()}));
    };
    CHECK_OR_EXIT(write().ok());
    CHECK_OR_EXIT(test::deny_syscall(SYS_io_uring_enter, EPERM));
    CHECK_OR_EXIT(write().error_number == EPERM);
    CHECK_OR_EXIT(write().error_number == EPERM);
  };
  EXPECT_EXIT((act(), std::exit(0)), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace ballast::aio::backend_test
