#include "ballast/aio/file.h"

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <thread>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "ballast/core/error.h"

#include "aio/anonymous_file.h"
#include "tests/support/direct_io.h"
#include "tests/support/temp_dir.h"

namespace ballast::aio::file_test {
namespace {

using test::TempDir;
using Access = File::Access;

/// Message of the Error(io) that `act` throws.
std::string io_error(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::io);
    return error.what();
  }
  return "no error";
}

std::string creation_error(const std::filesystem::path& directory, Bytes size) {
  return io_error([&] { (void)File::create_anonymous(directory, size, Access::buffered); });
}

void expect_parts(const std::string& text, std::initializer_list<std::string> parts) {
  for (const auto& part : parts) EXPECT_NE(text.find(part), std::string::npos) << text;
}

TEST(File, AnAnonymousFileHasItsSizeAndItsBlocksButNoName) {
  const TempDir directory;
  for (const Access access : {Access::direct, Access::buffered}) {
    if (access == Access::direct && !test::has_direct_io(directory.path())) continue;
    const File file = File::create_anonymous(directory.path(), 3 * kMiB, access);
    struct stat status {};
    ASSERT_EQ(fstat(file.descriptor(), &status), 0);
    EXPECT_EQ(status.st_size, static_cast<off_t>(3 * kMiB));
    EXPECT_GE(status.st_blocks * 512, static_cast<off_t>(3 * kMiB));
    EXPECT_EQ(status.st_nlink, 0U);
    EXPECT_EQ(file.size(), 3 * kMiB);
    EXPECT_EQ(file.name(), directory.path());
    EXPECT_EQ(file.alignment() == 1, access == Access::buffered);
    EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
  }
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

TEST(File, MovingHandsOverTheDescriptorAndDestructionClosesIt) {
  const TempDir directory;
  int descriptor = -1;
  {
    File first = File::create_anonymous(directory.path(), kPage, Access::buffered);
    descriptor = first.descriptor();
    File second = std::move(first);
    EXPECT_EQ(second.descriptor(), descriptor);
    File third = File::create_anonymous(directory.path(), 2 * kPage, Access::buffered);
    third = std::move(second);
    EXPECT_EQ(third.descriptor(), descriptor);
    EXPECT_EQ(third.size(), kPage);
  }
  EXPECT_EQ(fcntl(descriptor, F_GETFD), -1);
  EXPECT_EQ(errno, EBADF);
}

TEST(File, OpensAnExistingFileWithItsSize) {
  const TempDir directory;
  const auto path = directory.write("data", std::string(5000, 'x'));
  const File file = File::open(path, true, Access::buffered);
  EXPECT_EQ(file.size(), 5000U);
  EXPECT_EQ(file.name(), path);
  EXPECT_EQ(pwrite(file.descriptor(), "y", 1, 0), 1);
  const File readable = File::open(path, false, Access::buffered);
  EXPECT_EQ(pwrite(readable.descriptor(), "y", 1, 0), -1);
}

TEST(File, ASwapFileGrowsWithItsBlocksAndKeepsItsContent) {
  const test::TempDir dir;
  const auto path = dir.path() / "rank-0.swap-0";
  std::ofstream(path) << std::string(2 * kPage, 'x');
  const std::filesystem::path place = dir.path();
  EXPECT_EQ(File::open_swap(path, place, kPage, File::Access::buffered).size(), 2 * kPage);
  const File file = File::open_swap(path, place, 5 * kPage, File::Access::buffered);
  EXPECT_EQ(file.size(), 5 * kPage);
  EXPECT_EQ(file.name(), place.string());
  struct stat status {};
  ASSERT_EQ(stat(path.c_str(), &status), 0);
  EXPECT_EQ(static_cast<Bytes>(status.st_size), 5 * kPage);
  std::ifstream in(path);
  const std::string content(std::istreambuf_iterator<char>(in), {});
  EXPECT_EQ(content, std::string(2 * kPage, 'x') + std::string(3 * kPage, '\0'));
  EXPECT_EQ(write_zeros(file.descriptor(), 6 * kPage, kPage, 5 * kPage), 0);
  std::ifstream again(path);
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(again), {}),
            content + std::string(kPage, '\0'));
}

/// Returns whether the file can be locked through another descriptor.
bool is_free(const std::filesystem::path& path) {
  const Descriptor other(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  return flock(other.number(), LOCK_SH | LOCK_NB) == 0;
}

TEST(File, ASwapFileIsLockedWhileItIsOpen) {
  const TempDir dir;
  const auto path = dir.path() / "swap";
  {
    const File file = File::create_anonymous(dir.path(), kPage, Access::buffered);
    if (!file.link(path)) GTEST_SKIP() << "the file system cannot name nameless files";
    EXPECT_FALSE(is_free(path));
  }
  EXPECT_TRUE(is_free(path));
  Descriptor other(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  ASSERT_EQ(flock(other.number(), LOCK_EX | LOCK_NB), 0);
  // The kernel frees locks of a killed process late, so opening the file waits.
  std::thread late([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    flock(other.number(), LOCK_UN);
  });
  const File file = File::open_swap(path, dir.path(), kPage, Access::buffered);
  late.join();
  EXPECT_FALSE(is_free(path));
}

TEST(File, RefusesMissingAndIrregularFiles) {
  const TempDir directory;
  expect_parts(io_error([&] { (void)File::open(directory.path() / "none", false); }),
               {"cannot open", "none", "No such file"});
  expect_parts(io_error([&] { (void)File::open(directory.path(), false, Access::buffered); }),
               {directory.path(), "not a regular file"});
}

TEST(File, AMissingDirectoryIsNamed) {
  const TempDir directory;
  expect_parts(creation_error(directory.path() / "none", kPage),
               {(directory.path() / "none").string() + ": no such directory", "create it"});
  const auto file = directory.write("file", "");
  expect_parts(creation_error(file / "below", kPage), {"file/below: no such directory"});
  expect_parts(creation_error(file, kPage), {"file is not a directory"});
}

TEST(File, ADirectoryThatTakesNoFilesIsNamed) {
  expect_parts(creation_error("/proc/self", 0), {"/proc/self: ", "choose another"});
  if (geteuid() == 0) return;  // root can write everywhere
  const TempDir directory;
  std::filesystem::permissions(
      directory.path(), std::filesystem::perms::owner_read | std::filesystem::perms::owner_exec);
  expect_parts(creation_error(directory.path(), kPage), {"the directory is not writable"});
}

TEST(File, MoreThanTheFreeSpaceIsRefusedWithBothNumbers) {
  const TempDir directory;
  struct statvfs status {};
  ASSERT_EQ(statvfs(directory.path().c_str(), &status), 0);
  const Bytes size = Bytes{status.f_blocks} * status.f_frsize + 1 * kPage;
  expect_parts(
      creation_error(directory.path(), size),
      {directory.path(), "needs " + format_bytes(size), "(" + std::to_string(size) + " bytes)",
       " are free; ", "another path", std::strerror(ENOSPC)});
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

TEST(File, AFileSizeLimitIsCheckedBeforeWriting) {
  const TempDir directory;
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit low = before;
  low.rlim_cur = kMiB;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &low), 0);
  const std::string message = creation_error(directory.path(), kMiB + 1);
  EXPECT_NO_THROW((void)File::create_anonymous(directory.path(), kMiB, Access::buffered));
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  expect_parts(message, {directory.path(), "file-size limit of 1048576 bytes", "ulimit -f"});
}

TEST(File, ZerosAreWrittenWhereTheFileSystemCannotAllocate) {
  const TempDir directory;
  const bool direct = test::has_direct_io(directory.path());
  const File file =
      File::create_anonymous(directory.path(), 0, direct ? Access::direct : Access::buffered);
  const Bytes size = 2 * kMiB + 3 * kPage + 100;  // not a multiple of any alignment
  ASSERT_EQ(write_zeros(file.descriptor(), size, file.alignment()), 0);
  struct stat status {};
  ASSERT_EQ(fstat(file.descriptor(), &status), 0);
  EXPECT_EQ(status.st_size, static_cast<off_t>(size));
  EXPECT_GE(status.st_blocks * 512, static_cast<off_t>(size));
  EXPECT_EQ(write_zeros(-1, size, 1), EBADF);
}

TEST(File, InMemoryHasItsSizeAndNoAlignmentAndKeepsWhatIsWritten) {
  const File file = File::create_in_memory(3 * kMiB);
  EXPECT_EQ(file.size(), 3 * kMiB);
  EXPECT_EQ(file.alignment(), 1U);
  ASSERT_EQ(pwrite(file.descriptor(), "words", 5, 2 * kMiB), 5);
  std::array<char, 5> read{};
  ASSERT_EQ(pread(file.descriptor(), read.data(), read.size(), 2 * kMiB), 5);
  EXPECT_EQ(std::string(read.data(), read.size()), "words");
}

}  // namespace
}  // namespace ballast::aio::file_test
