#include <fstream>
#include <string>

#include <gtest/gtest.h>
#include <sys/stat.h>

#include "ballast/aio/file.h"
#include "ballast/core/error.h"

#include "tests/support/temp_dir.h"

namespace ballast::aio::file_system_test {
namespace {

using Kind = FileSystem::Kind;

/// The kernel's name of the file system at `directory`; "" if nothing is mounted there.
std::string mounted_at(const std::string& directory) {
  std::ifstream mounts("/proc/self/mounts");
  std::string device;
  std::string place;
  std::string type;
  std::string rest;
  std::string found;
  while (mounts >> device >> place >> type && std::getline(mounts, rest)) {
    if (place == directory) found = type;
  }
  return found;
}

TEST(FileSystem, HasATypeFreeSpaceAndADevice) {
  const test::TempDir directory;
  const FileSystem found = inspect_file_system(directory.path());
  EXPECT_FALSE(found.type.empty());
  ASSERT_TRUE(found.free.has_value());
  struct stat status {};
  ASSERT_EQ(stat(directory.path().c_str(), &status), 0);
  EXPECT_EQ(found.device, status.st_dev);
  std::filesystem::create_directory(directory.path() / "below");
  EXPECT_EQ(inspect_file_system(directory.path() / "below").device, found.device);
}

TEST(FileSystem, HasTheKernelsName) {
  int compared = 0;
  for (const std::string directory : {"/", "/dev/shm", "/tmp", "/run", "/home"}) {
    const std::string type = mounted_at(directory);
    if (type.empty()) continue;
    const FileSystem found = inspect_file_system(directory);
    if (found.type.rfind("0x", 0) == 0) continue;
    ++compared;
    const bool ext = type == "ext2" || type == "ext3";
    const bool fuse = type.rfind("fuse", 0) == 0 || type == "virtiofs";
    EXPECT_EQ(found.type, ext ? "ext4" : fuse ? "fuse" : type == "nfs4" ? "nfs" : type);
    const Kind kind = type == "tmpfs"                          ? Kind::memory
                      : type == "overlay"                      ? Kind::overlay
                      : ext || type == "ext4" || type == "xfs" ? Kind::disk
                                                               : found.kind;
    EXPECT_EQ(found.kind, kind) << type;
  }
  if (compared == 0) GTEST_SKIP() << "no mount of a known type";
}

TEST(FileSystem, UnknownTypesCountAsDisks) {
  const FileSystem found = inspect_file_system("/proc/self");
  EXPECT_EQ(found.kind, Kind::disk);
  EXPECT_EQ(found.type, "0x9fa0");
  EXPECT_FALSE(found.free.has_value());
}

TEST(FileSystem, OfANonDirectoryIsAnError) {
  const test::TempDir directory;
  const auto message = [](const std::filesystem::path& path) -> std::string {
    try {
      static_cast<void>(inspect_file_system(path));
    } catch (const Error& error) {
      EXPECT_EQ(error.category(), ErrorCategory::io);
      return error.what();
    }
    return "";
  };
  const auto file = directory.write("file", "x");
  EXPECT_EQ(
      message(directory.path() / "none"),
      (directory.path() / "none").string() + ": no such directory; create it or choose another");
  EXPECT_NE(message(file).find("file is not a directory"), std::string::npos);
  EXPECT_NE(message(file / "below").find("no such directory"), std::string::npos);
}

TEST(FileSystem, SuitsSwappingOnlyIfItIsADisk) {
  const auto reason = [](Kind kind, const std::string& type) {
    return unsuited_for_swap({.kind = kind, .type = type, .free = {}, .device = 0}, "/x");
  };
  EXPECT_EQ(reason(Kind::disk, "ext4"), "");
  EXPECT_EQ(
      reason(Kind::memory, "tmpfs"),
      "/x is on a tmpfs file system: its files are in memory, so swapping to it saves no memory");
  EXPECT_NE(reason(Kind::overlay, "overlay").find("/x is on an overlay file system: "),
            std::string::npos);
  EXPECT_NE(reason(Kind::network, "nfs").find("/x is on a nfs file system: "), std::string::npos);
}

}  // namespace
}  // namespace ballast::aio::file_system_test
