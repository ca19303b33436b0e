// Tests where NVIDIA's libraries are looked for, in made-up folders with fake libraries.
#include <filesystem>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "src/device/cuda/libraries.h"
#include "src/device/shared_library.h"
#include "tests/support/temp_dir.h"

namespace ballast::device::cuda_libraries_test {
namespace {

namespace fs = std::filesystem;

/// The functions of a fake library. The tests require version 13.
struct Fake {
  int (*major)() = nullptr;

  void find(Symbols& symbols) { symbols.find("fake_library_major", major); }
  [[nodiscard]] std::string refusal() const {
    return major() == 13 ? "" : fmt::format("it is version {}", major());
  }
};

class CudaLibraries : public testing::Test {
 protected:
  CudaLibraries() { environment_.system = folder_.path() / "system"; }

  /// Puts a library at `place` and returns its path.
  std::string put(const fs::path& place, const char* library = BALLAST_FAKE_LIBRARY) const {
    const fs::path file = folder_.path() / place / "libballast-fake.so.13";
    fs::create_directories(file.parent_path());
    fs::copy_file(library, file);
    return file.string();
  }
  [[nodiscard]] std::string below(const fs::path& place) const {
    return (folder_.path() / place).string();
  }
  [[nodiscard]] Loaded<Fake> load() const {
    return load_library<Fake>(library_names("libballast-fake.so", 13, environment_), "install it");
  }

  test::TempDir folder_;
  SearchEnvironment environment_;
};

TEST_F(CudaLibraries, TheLoadersOwnSearchComesFirst) {
  const auto names = library_names("libballast-fake.so", 13, environment_);
  EXPECT_EQ(names, (std::vector<std::string>{"libballast-fake.so.13", "libballast-fake.so"}));
  EXPECT_EQ(load().refusal,
            "libballast-fake.so.13 cannot be loaded: cannot open shared object file: No such file "
            "or directory; install it");
}

TEST_F(CudaLibraries, ToolkitsAreSearchedAfterTheLoader) {
  const std::string system = put("system/usr/local/cuda/lib64");
  EXPECT_EQ(load().file, system);
  const std::string named = put("toolkit/lib64");
  environment_.cuda_path = below("toolkit");
  EXPECT_EQ(load().file, named);
  const std::string home = put("home/lib");
  environment_.cuda_home = below("home");
  EXPECT_EQ(load().file, home);
}

TEST_F(CudaLibraries, PythonWheelsAreSearchedLast) {
  const std::string system = put("system/usr/local/lib/python3.12/dist-packages/nvidia/cu13/lib");
  EXPECT_EQ(load().file, system);
  const std::string user = put("me/.local/lib/python3.12/site-packages/nvidia/cu13/lib");
  environment_.home = below("me");
  EXPECT_EQ(load().file, user);
  const std::string in_path = put("tree/lib/python3.12/site-packages/nvidia/cublas/lib");
  fs::create_directories(below("tree/bin"));
  fs::create_symlink("/bin/sh", below("tree/bin/python3"));
  environment_.path = "/nowhere:" + below("tree/bin");
  EXPECT_EQ(load().file, in_path);
  const std::string active = put("env/lib/python3.9/site-packages/nvidia/nccl/lib");
  environment_.virtual_env = below("env");
  EXPECT_EQ(load().file, active);
  const std::string newer = put("env/lib/python3.12/site-packages/nvidia/cu13/lib");
  EXPECT_EQ(load().file, newer);
  const std::string toolkit = put("system/usr/local/cuda/lib64");
  EXPECT_EQ(load().file, toolkit);
}

TEST_F(CudaLibraries, APython3ThatIsALinkLeadsToItsOwnPackages) {
  const std::string wheel = put("python/lib/python3.12/site-packages/nvidia/cudnn/lib");
  fs::create_directories(below("python/bin"));
  fs::create_directories(below("links"));
  fs::copy_file(BALLAST_FAKE_LIBRARY, below("python/bin/python3.12"));
  fs::create_symlink(below("python/bin/python3.12"), below("links/python3"));
  environment_.path = below("links");
  EXPECT_EQ(load().file, wheel);
}

TEST_F(CudaLibraries, AnUnsuitableOneIsPassedOverAndNamedIfThereIsNoOther) {
  const std::string old = put("toolkit/lib64", BALLAST_OLD_FAKE_LIBRARY);
  environment_.cuda_home = below("toolkit");
  EXPECT_EQ(load().refusal, old + " cannot be loaded: it is version 12; install it");
  environment_.virtual_env = below("env");
  const std::string wheel = put("env/lib/python3.12/site-packages/nvidia/cu13/lib");
  const auto found = load();
  EXPECT_EQ(found.refusal, "");
  EXPECT_EQ(found.file, wheel);
  EXPECT_EQ(found.functions.major(), 13);
}

}  // namespace
}  // namespace ballast::device::cuda_libraries_test
