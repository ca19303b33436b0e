#include "ballast/state/swap_plan.h"

#include <mutex>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "ballast/aio/file.h"
#include "ballast/core/error.h"

#include "tests/support/temp_dir.h"

namespace ballast::state::swap_plan_test {
namespace {

using test::TempDir;
using Access = aio::File::Access;

SwapPath at(const std::filesystem::path& directory, double read = 0.0, double write = 0.0) {
  return {
      .directory = directory, .io = {.backend = "threads"}, .read_gbps = read, .write_gbps = write};
}

/// Options that work in any folder for temporary files.
SwapOptions over(std::vector<SwapPath> paths) {
  return {.paths = std::move(paths), .access = Access::buffered, .any_file_system = true};
}

std::string message(const SwapOptions& options, const std::vector<Bytes>& extents) {
  try {
    static_cast<void>(plan_swap(options, extents));
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::io);
    return error.what();
  }
  return "";
}

/// Slightly more than the file system of `directory` can ever hold.
Bytes too_much(const std::filesystem::path& directory) {
  struct statvfs status {};
  EXPECT_EQ(statvfs(directory.c_str(), &status), 0);
  return Bytes{status.f_blocks} * status.f_frsize + kMiB;
}

void expect_parts(const std::string& text, std::initializer_list<std::string> parts) {
  for (const auto& part : parts) EXPECT_NE(text.find(part), std::string::npos) << text;
}

TEST(SwapPlan, DividesByTheHarmonicMeanOfBothDirections) {
  const TempDir a;
  const TempDir b;
  // 2 / (1/3 + 1/1.5) = 2 and 2 / (1/1 + 1/1) = 1
  const SwapPlan plan =
      plan_swap(over({at(a.path(), 3.0, 1.5), at(b.path(), 1.0, 1.0)}), std::vector{30 * kMiB});
  EXPECT_EQ(plan.stripe.file_bytes(0), 20 * kMiB);
  EXPECT_EQ(plan.stripe.file_bytes(1), 10 * kMiB);
}

TEST(SwapPlan, MeasuresSeveralPathsOfUnknownSpeedAndSaysSo) {
  const TempDir a;
  const TempDir b;
  std::mutex mutex;
  std::vector<std::string> lines;
  set_log_sink([&](LogLevel, std::string_view line) {
    const std::lock_guard lock(mutex);
    if (line.rfind("swap: ", 0) == 0) lines.emplace_back(line);
  });
  const SwapPlan plan =
      plan_swap(over({at(a.path()), at(b.path(), 0.25, 0.5)}), std::vector{4 * kMiB});
  static_cast<void>(plan_swap(over({at(a.path())}), std::vector{4 * kMiB}));
  set_log_sink({});
  EXPECT_GT(plan.options.paths[0].read_gbps, 0.0);
  EXPECT_GT(plan.options.paths[0].write_gbps, 0.0);
  EXPECT_EQ(plan.options.paths[1].read_gbps, 0.25);
  EXPECT_EQ(plan.stripe.bytes(), 4 * kMiB);
  ASSERT_EQ(lines.size(), 1U) << "one path needs no measuring";
  expect_parts(lines[0], {a.path().string() + " reads ",
                          b.path().string() + " reads 0.25 and writes 0.50 GB/s"});
  EXPECT_TRUE(std::filesystem::is_empty(a.path()));
}

TEST(SwapPlan, TakesRunsAsLongAsTheLargestBlock) {
  const TempDir a;
  SwapPath path = at(a.path());
  path.io.block_bytes = 4 * kMiB;
  const SwapPlan plan = plan_swap(over({path}), std::vector{9 * kMiB});
  EXPECT_EQ(plan.stripe.segments(0).size(), 3U);
}

TEST(SwapPlan, NamesAnUnusablePath) {
  const TempDir a;
  const auto file = a.write("file", "x");
  expect_parts(message(over({at(a.path() / "none")}), {kPage}),
               {(a.path() / "none").string(), "no such directory; create it"});
  expect_parts(message(over({at(file)}), {kPage}), {file.string(), "is not a directory"});
  expect_parts(message(over({at("/proc/self")}), {kPage}), {"/proc/self: ", "choose another"});
  expect_parts(message(over({at(a.path(), 1.0, 1.0), at(a.path() / "none", 1.0, 1.0)}), {kPage}),
               {"none: no such directory"});
  SwapPath named = at(a.path() / "none");
  named.key = "a.key";
  EXPECT_EQ(message(over({named}), {kPage}),
            "a.key: " + (a.path() / "none").string() +
                ": no such directory; create it or choose another");
}

TEST(SwapPlan, RefusesFileSystemsThatAreNoDiskUnlessAllowed) {
  const std::filesystem::path memory = "/dev/shm";
  if (!std::filesystem::is_directory(memory) || access(memory.c_str(), W_OK) != 0 ||
      aio::inspect_file_system(memory).kind != aio::FileSystem::Kind::memory) {
    GTEST_SKIP() << "no tmpfs to write to";
  }
  SwapOptions options = over({at(memory)});
  EXPECT_EQ(message(options, {kPage}), "");
  options.any_file_system = false;
  expect_parts(message(options, {kPage}),
               {"/dev/shm is on a tmpfs file system", "set aio.any_file_system to true"});
}

TEST(SwapPlan, RefusesMoreThanIsFree) {
  const TempDir a;
  const Bytes size = too_much(a.path());
  expect_parts(message(over({at(a.path())}), {size}),
               {a.path().string() + ": swapping needs " + format_bytes(size), "are free; ",
                "another nvme_path", "No space left"});
}

TEST(SwapPlan, AddsUpWhatSharesAFileSystem) {
  const TempDir a;
  const TempDir b;
  const auto free = aio::inspect_file_system(a.path()).free;
  ASSERT_TRUE(free);
  const std::vector<Bytes> extents = {*free / 3 * 4};  // each half would fit alone
  expect_parts(message(over({at(a.path(), 1.0, 1.0), at(b.path(), 1.0, 1.0)}), extents),
               {a.path().string() + " and " + b.path().string() + " on one file system: swapping"});
}

TEST(SwapPlan, AcceptsADirectoryThatDoesNotExistYet) {
  const TempDir a;
  SwapPath path = at(a.path() / "x/y");
  path.made_later = true;
  EXPECT_EQ(message(over({path}), {kPage}), "");
  EXPECT_TRUE(std::filesystem::is_empty(a.path()));
  path.directory = a.write("file", "x") / "y";
  expect_parts(message(over({path}), {kPage}), {"file is not a directory"});
}

TEST(SwapPlan, FilesAreUsedAgainIfTheirExtentsComeFirst) {
  const TempDir dir;
  const std::vector<Bytes> all = {3 * kMiB, 2 * kMiB, 3 * kMiB, 2 * kMiB};
  const SwapOptions options = over({at(dir.path())});
  const SwapImage image = {.files = {dir.path() / "file"},
                           .extents = {3 * kMiB, 2 * kMiB, 3 * kMiB},
                           .weights = {1.0},
                           .segment_bytes = kMiB};
  const auto plan = reuse_swap(options, all, image);
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(plan->stripe.bytes(), 10 * kMiB);
  for (std::size_t e = 0; e < image.extents.size(); ++e) {
    EXPECT_EQ(plan->stripe.segments(e)[0].offset, image.stripe().segments(e)[0].offset);
  }
  EXPECT_FALSE(reuse_swap(options, std::vector{3 * kMiB, 2 * kMiB}, image).has_value());
  EXPECT_FALSE(reuse_swap(options, std::vector{2 * kMiB, 2 * kMiB, 3 * kMiB}, image).has_value());
  EXPECT_FALSE(reuse_swap(options, all, SwapImage{}).has_value());
  SwapImage elsewhere = image;
  elsewhere.files = {"/proc/file"};
  EXPECT_FALSE(reuse_swap(options, all, elsewhere).has_value());
  EXPECT_EQ(swap_bytes_on(dir.path(), options, all), 10 * kMiB);
  EXPECT_EQ(swap_bytes_on("/proc", options, all), 0U);
}

}  // namespace
}  // namespace ballast::state::swap_plan_test
