#include "ballast/text/files.h"

#include <array>
#include <fstream>
#include <iterator>
#include <string>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ballast/text/output_file.h"

#include "tests/support/temp_dir.h"

namespace ballast::text::files_test {
namespace {

using test::TempDir;

std::string text_of(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

template <class Action>
std::string error_of(Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

std::ptrdiff_t entries(const TempDir& dir) {
  return std::distance(std::filesystem::directory_iterator(dir.path()), {});
}

TEST(ReplacedFile, AppearsWholeOrNotAtAll) {
  const TempDir dir;
  const auto file = dir.write("a", "before");
  {
    ReplacedFile replaced(file);
    replaced.write("half");
    EXPECT_EQ(text_of(file), "before");
    EXPECT_EQ(text_of(replaced.temporary()), "half");
  }
  EXPECT_EQ(text_of(file), "before");
  ReplacedFile replaced(file);
  replaced.write("behind ");
  replaced.write("it");
  replaced.commit();
  EXPECT_EQ(text_of(file), "behind it");
  EXPECT_EQ(entries(dir), 1);
}

/// Two containers may have processes with the same number and a folder in common.
TEST(ReplacedFile, LeavesTheFileOfAnotherProcessWithTheSameNumber) {
  const TempDir dir;
  const auto file = dir.path() / "a";
  ReplacedFile one(file);
  one.write("one");
  ReplacedFile other(file);
  other.write("other");
  EXPECT_NE(one.temporary(), other.temporary());
  EXPECT_EQ(unfinished_of(file).size(), 2U);
  one.commit();
  EXPECT_EQ(text_of(file), "one");
  other.commit();
  EXPECT_EQ(text_of(file), "other");
  dir.write(temporary_of(file).filename().string(), "of a killed process");
  ReplacedFile again(file);
  EXPECT_EQ(again.temporary(), temporary_of(file));
}

TEST(MakeSeparate, CopiesFilesWithAnotherName) {
  const TempDir dir;
  const auto original = dir.write("original", "text");
  const auto hard = dir.path() / "hard";
  const auto symbolic = dir.path() / "symbolic";
  EXPECT_FALSE(make_separate(original));
  std::filesystem::create_hard_link(original, hard);
  std::filesystem::create_symlink(original, symbolic);
  for (const auto& link : {hard, symbolic}) {
    EXPECT_TRUE(make_separate(link));
    EXPECT_FALSE(make_separate(link));
    std::ofstream(link, std::ios::app) << " and more";
    EXPECT_EQ(text_of(link), "text and more");
    EXPECT_EQ(text_of(original), "text");
  }
  EXPECT_FALSE(make_separate(dir.path() / "missing"));
  EXPECT_FALSE(make_separate("/dev/null"));
}

TEST(ReplacedFile, KeepsTheModeOfTheOldOne) {
  const TempDir dir;
  const auto file = dir.write("a", "before");
  ASSERT_EQ(chmod(file.c_str(), 0666), 0);
  const mode_t umask_before = umask(077);
  ReplacedFile(file).commit();
  umask(umask_before);
  struct stat status = {};
  ASSERT_EQ(stat(file.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777U, 0666U);
}

TEST(ReplacedFile, NamesAPlaceThatCannotBeWritten) {
  const TempDir dir;
  const auto missing = dir.path() / "none" / "a";
  EXPECT_EQ(error_of([&] { ReplacedFile{missing}; }),
            "cannot write " + missing.string() + ": No such file or directory");
  EXPECT_EQ(error_of([&] { ReplacedFile{dir.path()}; }),
            "cannot write " + dir.path().string() + ": exists but is not a regular file");
  EXPECT_EQ(error_of([] { ReplacedFile{"/dev/null"}; }),
            "cannot write /dev/null: exists but is not a regular file");
  EXPECT_EQ(error_of([&] { ReplacedFile{dir.path() / "a/"}; }),
            "cannot write " + (dir.path() / "a/").string() + ": the path names a directory");
  EXPECT_EQ(entries(dir), 0);
}

TEST(ReplacedFile, FollowsNoLinkAndTakesLongNames) {
  const TempDir dir;
  const auto file = dir.write("a", "before");
  std::filesystem::create_symlink(file, dir.path() / "link");
  // A directory in which another user may make links, too.
  std::filesystem::create_symlink(file, dir.path() / ("link.tmp-" + std::to_string(getpid())));
  ReplacedFile replaced(dir.path() / "link");
  replaced.write("new");
  replaced.commit();
  EXPECT_EQ(text_of(file), "before");
  EXPECT_EQ(text_of(dir.path() / "link"), "new");
  ReplacedFile(dir.path() / std::string(255, 'n')).commit();
  EXPECT_TRUE(std::filesystem::exists(dir.path() / std::string(255, 'n')));
}

TEST(Unfinished, AreFilesWithTheNameAndANumber) {
  const TempDir dir;
  dir.write("a.tmp-12", "");
  for (const char* other : {"a", "a.tmp-", "a.tmp-1x", "b.tmp-1", "a.tmp-1.tmp-2"})
    dir.write(other, "");
  const auto found = unfinished_of(dir.path() / "a");
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found.front(), dir.path() / "a.tmp-12");
  const auto longest = dir.path() / std::string(255, 'n');
  const ReplacedFile replaced(longest);
  ASSERT_EQ(unfinished_of(longest).size(), 1U);
  EXPECT_EQ(unfinished_of(longest).front(), replaced.temporary());
}

TEST(ReplacedFile, FindsFilesOfOtherUsersBeforeTheWork) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  const TempDir dir;
  const auto file = dir.write("a", "of root");
  ASSERT_EQ(chmod(dir.path().c_str(), 01777), 0);
  ASSERT_EQ(seteuid(65534), 0);
  const std::string error = error_of([&] { ReplacedFile{file}; });
  ASSERT_EQ(seteuid(0), 0);
  EXPECT_EQ(error, "cannot write " + file.string() +
                       ": it belongs to another user, who alone may replace it");
  EXPECT_EQ(error_of([&] { ReplacedFile{file}; }), "");
  EXPECT_EQ(entries(dir), 1);
}

TEST(OutputFile, ReplacesOtherKindsOnlyWithOverwrite) {
  const TempDir dir;
  const OutputRule rule = {.kind = "a list", .begins = "list: "};
  const auto file = dir.write("a", "list of mine");
  EXPECT_EQ(error_of([&] { check_output(file, rule); }),
            file.string() +
                " exists and is not a list: choose another file, or give --overwrite "
                "to replace it");
  EXPECT_EQ(error_of([&] { check_output(file, {.kind = "", .begins = ""}); }),
            file.string() + " exists: choose another file, or give --overwrite to replace it");
  EXPECT_EQ(text_of(file), "list of mine");
  write_output(file, {.kind = "", .begins = "", .overwrite = true}, "list: a");
  write_output(file, rule, "list: b");
  EXPECT_EQ(text_of(file), "list: b");
  const auto empty = dir.write("empty", "");  // made by mktemp
  write_output(empty, rule, "list: c");
  EXPECT_EQ(text_of(empty), "list: c");
  EXPECT_EQ(entries(dir), 2);
}

TEST(OutputFile, NeverReplacesInputsNorWhatLinksName) {
  const TempDir dir;
  const auto input = dir.write("folder/input", "input");
  std::filesystem::create_hard_link(input, dir.path() / "hard");
  for (const auto& known : {input, dir.path() / "folder"}) {
    const OutputRule rule = {.kind = "", .begins = "input", .overwrite = true, .inputs = {known}};
    EXPECT_NE(error_of([&] { check_output(input, rule); }).find("is an input"), std::string::npos);
  }
  const OutputRule rule = {.kind = "", .begins = "input", .inputs = {input}};
  EXPECT_NE(error_of([&] { check_output(dir.path() / "hard", rule); }), "");
  for (const char* target : {"hard", "missing"}) {
    const auto link = dir.path() / "link";
    std::filesystem::create_symlink(target, link);
    const OutputRule asked = {.kind = "", .begins = "input", .overwrite = true};
    EXPECT_NE(
        error_of([&] { check_output(link, {.kind = "", .begins = "input"}); }).find("symbolic"),
        std::string::npos);
    write_output(link, asked, "new");
    EXPECT_FALSE(std::filesystem::is_symlink(link));
    std::filesystem::remove(link);
  }
  EXPECT_EQ(text_of(dir.path() / "hard"), "input");
  EXPECT_FALSE(std::filesystem::exists(dir.path() / "missing"));
  std::filesystem::create_directory_symlink("folder", dir.path() / "link");
  EXPECT_NE(error_of([&] {
              check_output(dir.path() / "link", {.overwrite = true});
            }).find("is a directory"),
            std::string::npos);
}

TEST(OutputFile, DoesNotReplaceFilesMadeAfterTheCheck) {
  const TempDir dir;
  const auto file = dir.path() / "a";
  OutputFile output(file, {});
  output.write("mine");
  dir.write("a", "of another process");
  EXPECT_NE(error_of([&] { output.commit(); }).find("another process"), std::string::npos);
  EXPECT_EQ(text_of(file), "of another process");
}

TEST(OutputFile, WritesToDevicesAndPipes) {
  const TempDir dir;
  EXPECT_EQ(error_of([] { write_output("/dev/null", {}, "text"); }), "");
  EXPECT_NE(error_of([] { write_output("/dev/full", {}, "text"); }).find("No space left"),
            std::string::npos);
  std::array<int, 2> ends = {};
  ASSERT_EQ(pipe(ends.data()), 0);
  write_output("/dev/fd/" + std::to_string(ends[1]), {}, "text");
  std::array<char, 8> got = {};
  EXPECT_EQ(read(ends[0], got.data(), got.size()), 4);
  close(ends[0]);
  close(ends[1]);
  const auto fifo = dir.path() / "fifo";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  check_output(fifo, {});  // without a reader
  const int reader = open(fifo.c_str(), O_RDONLY | O_NONBLOCK);
  write_output(fifo, {}, "text");
  EXPECT_EQ(read(reader, got.data(), got.size()), 4);
  close(reader);
  EXPECT_EQ(entries(dir), 1);
}

TEST(ReadSettings, SaysWhyAFileIsNotRead) {
  const TempDir dir;
  EXPECT_EQ(read_settings(dir.write("a", "text"), "config"), "text");
  const auto pointer = dir.write("lfs", "version https://git-lfs.github.com/spec/v1");
  EXPECT_EQ(error_of([&] { read_settings(pointer, "config"); }),
            pointer.string() +
                ": is a git-lfs pointer, not the file itself: run `git lfs pull` in its folder");
  EXPECT_EQ(error_of([&] { read_settings(dir.path(), "config"); }),
            dir.path().string() + ": is a directory; give a config file");
  const auto missing = dir.path() / "none";
  EXPECT_EQ(error_of([&] { read_settings(missing, "config"); }),
            missing.string() + ": cannot open the config: No such file or directory");
  const auto large = dir.write("large", std::string(kMiB + 1, ' '));
  EXPECT_EQ(error_of([&] { read_settings(large, "config"); }),
            large.string() + ": too long for a config file: above 1 MiB");
}

}  // namespace
}  // namespace ballast::text::files_test
