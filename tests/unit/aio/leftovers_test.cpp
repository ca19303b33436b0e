#include <csignal>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ballast/aio/file.h"
#include "ballast/core/error.h"

#include "aio/anonymous_file.h"
#include "tests/support/temp_dir.h"

namespace ballast::aio::leftovers_test {
namespace {

using test::TempDir;

/// Collects the log lines of a test.
class Log {
 public:
  Log() {
    set_log_sink([this](LogLevel, std::string_view line) {
      const std::lock_guard lock(mutex_);
      lines_.emplace_back(line);
    });
  }
  ~Log() { set_log_sink({}); }
  Log(const Log&) = delete;
  Log& operator=(const Log&) = delete;
  [[nodiscard]] std::vector<std::string> lines() const {
    const std::lock_guard lock(mutex_);
    return lines_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> lines_;
};

class ForceNames {
 public:
  ForceNames() { force_named_files(true); }
  ~ForceNames() { force_named_files(false); }
  ForceNames(const ForceNames&) = delete;
  ForceNames& operator=(const ForceNames&) = delete;
};

std::size_t entries(const std::filesystem::path& directory) {
  return static_cast<std::size_t>(
      std::distance(std::filesystem::directory_iterator(directory), {}));
}

/// A child process with a named file of one page, to which it writes until it is killed.
class Writer {
 public:
  explicit Writer(const std::filesystem::path& directory) {
    int ready[2];
    EXPECT_EQ(pipe(ready), 0);
    pid_ = fork();
    if (pid_ == 0) write_for_ever(directory, ready[1]);
    close(ready[1]);
    char byte = 0;
    EXPECT_EQ(read(ready[0], &byte, 1), 1);
    close(ready[0]);
  }
  ~Writer() { kill(); }
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    int status = 0;
    EXPECT_EQ(waitpid(pid_, &status, 0), pid_);
    EXPECT_TRUE(WIFSIGNALED(status));
    pid_ = -1;
  }

 private:
  [[noreturn]] static void write_for_ever(const std::filesystem::path& directory, int ready) {
    const NamedFile file = create_named(directory.string(), 0);
    const std::vector<char> page(kPage, 'x');
    bool told = false;
    while (file.descriptor.is_open()) {
      if (pwrite(file.descriptor.number(), page.data(), page.size(), 0) < 0) break;
      if (!told && write(ready, "r", 1) == 1) told = true;
    }
    _exit(1);
  }

  pid_t pid_ = -1;
};

TEST(Leftovers, OfAKilledRunAreRemovedByTheNextRun) {
  const TempDir directory;
  const Log log;
  Writer writer(directory.path());
  ASSERT_EQ(entries(directory.path()), 1U);
  writer.kill();
  ASSERT_EQ(entries(directory.path()), 1U) << "the kill left no file: nothing is shown";
  const File file = File::create_anonymous(directory.path(), kPage, File::Access::buffered);
  EXPECT_EQ(entries(directory.path()), 0U);
  const std::string wanted =
      "aio: removed 1 swap file (4.00 KiB) of crashed runs from " + directory.path().string();
  EXPECT_EQ(log.lines().front(), wanted);
}

TEST(Leftovers, DoNotIncludeFilesOfARunningProcess) {
  const TempDir directory;
  Writer dead(directory.path());
  const Writer living(directory.path());
  dead.kill();
  EXPECT_EQ(remove_leftovers(directory.path()).files, 1U);
  EXPECT_EQ(remove_leftovers(directory.path()).files, 0U);
  EXPECT_EQ(entries(directory.path()), 1U);
}

TEST(Leftovers, DoNotIncludeFilesWithSimilarNames) {
  const TempDir directory;
  for (const char* name : {".ballast-swap-1", ".ballast-swap-1-", ".ballast-swap--1",
                           ".ballast-swap-1-2x", ".ballast-swap-a-2", "ballast-swap-1-2"}) {
    directory.write(name, "mine");
  }
  std::filesystem::create_directory(directory.path() / ".ballast-swap-1-2");
  std::filesystem::create_symlink(directory.write("other", "mine"),
                                  directory.path() / ".ballast-swap-1-3");
  ASSERT_EQ(mkfifo((directory.path() / ".ballast-swap-1-4").c_str(), 0600), 0);
  EXPECT_EQ(remove_leftovers(directory.path()).files, 0U);
  EXPECT_EQ(entries(directory.path()), 10U);
  directory.write(".ballast-swap-1-5", "");
  EXPECT_EQ(remove_leftovers(directory.path()).files, 1U);
  EXPECT_EQ(remove_leftovers(directory.path() / "none").files, 0U);
}

TEST(NamedFiles, AreUnlinkedAtOnceAndUsable) {
  const TempDir directory;
  const ForceNames forced;
  const File file = File::create_anonymous(directory.path(), 3 * kPage, File::Access::buffered);
  EXPECT_EQ(entries(directory.path()), 0U);
  struct stat status {};
  ASSERT_EQ(fstat(file.descriptor(), &status), 0);
  EXPECT_EQ(status.st_nlink, 0U);
  EXPECT_EQ(status.st_size, static_cast<off_t>(3 * kPage));
  EXPECT_EQ(pwrite(file.descriptor(), "y", 1, 0), 1);
}

TEST(NamedFiles, AreLockedUntilTheirOwnerCloses) {
  const TempDir directory;
  NamedFile file = create_named(directory.path().string(), 0);
  ASSERT_TRUE(file.descriptor.is_open());
  const Descriptor again(open(file.path.c_str(), O_RDONLY | O_CLOEXEC));
  EXPECT_EQ(flock(again.number(), LOCK_EX | LOCK_NB), -1);
  file.descriptor = Descriptor();
  EXPECT_EQ(remove_leftovers(directory.path()).files, 1U);
}

TEST(NamedFiles, ReportWhyTheyCannotBe) {
  const ForceNames forced;
  EXPECT_FALSE(open_nameless("/nowhere", 0).is_open());
  EXPECT_EQ(errno, ENOENT);
}

// Creates and sweeps in one directory at the same time: no creation fails, and no file is left.
TEST(NamedFiles, SurviveConcurrentSweeps) {
  const TempDir directory;
  constexpr int kProcesses = 4;
  constexpr int kRounds = 200;
  std::vector<pid_t> children;
  for (int p = 0; p < kProcesses; ++p) {
    const pid_t child = fork();
    if (child == 0) {
      force_named_files(true);
      bool good = true;
      for (int i = 0; i < kRounds; ++i) {
        const NamedFile file = create_named(directory.path().string(), 0);
        static_cast<void>(remove_leftovers(directory.path()));
        struct stat status {};
        good = good && file.descriptor.is_open() && fstat(file.descriptor.number(), &status) == 0 &&
               status.st_nlink == 1;
        unlink(file.path.c_str());
      }
      _exit(good ? 0 : 1);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status));
    EXPECT_EQ(WEXITSTATUS(status), 0);
  }
  EXPECT_EQ(entries(directory.path()), 0U);
}

}  // namespace
}  // namespace ballast::aio::leftovers_test
