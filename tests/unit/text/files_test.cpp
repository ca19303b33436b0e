#include "ballast/text/files.h"

#include <fstream>
#include <iterator>
#include <string>

#include <gtest/gtest.h>
#include <sys/stat.h>

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
