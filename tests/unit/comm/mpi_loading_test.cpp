// Tests where the MPI module is looked for, and what is refused as one. e2e/mpi_module_test.py
// loads it.
#include "src/comm/mpi_loading.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/temp_dir.h"

namespace ballast::comm::mpi_loading_test {
namespace {

using Paths = std::vector<std::filesystem::path>;

TEST(MpiModule, IsNextToTheProgramOrInALibraryFolder) {
  ASSERT_EQ(std::getenv("BALLAST_MPI_MODULE"), nullptr);
  const Paths places = mpi_module_places("/some/prefix/bin/ballast");
  ASSERT_EQ(places.size(), 3U);
  EXPECT_EQ(places[0], "/some/prefix/bin/ballast_mpi.so");
  EXPECT_EQ(places[1], "/some/prefix/lib/ballast_mpi.so");
  EXPECT_EQ(places[2].parent_path().filename(), "ballast");
}

TEST(MpiModule, AnEnvironmentVariableNamesTheOnlyPlace) {
  setenv("BALLAST_MPI_MODULE", "/elsewhere/mpich.so", 1);
  EXPECT_EQ(mpi_module_places("/some/prefix/bin/ballast"), Paths{"/elsewhere/mpich.so"});
  unsetenv("BALLAST_MPI_MODULE");
}

TEST(MpiModule, TheFoldersWithoutOneAreNamedInOneLine) {
  const Paths places = {"/nowhere/bin/ballast_mpi.so", "/nowhere/lib/ballast_mpi.so",
                        "/nowhere/lib/ballast/ballast_mpi.so"};
  EXPECT_EQ(
      load_mpi(places).refusal,
      "its MPI module ballast_mpi.so is not in /nowhere/bin, /nowhere/lib or "
      "/nowhere/lib/ballast; install an MPI library with its headers, then build the program or "
      "the package again");
}

TEST(MpiModule, AnotherFileIsRefusedWithItsPath) {
  const test::TempDir folder;
  const auto file = folder.path() / "ballast_mpi.so";
  std::ofstream(file) << "not a library";
  const LoadedMpi loaded = load_mpi(Paths{file});
  EXPECT_EQ(loaded.calls, nullptr);
  EXPECT_EQ(loaded.refusal.find("its MPI module " + file.string() + " cannot be used: "), 0U)
      << loaded.refusal;
  EXPECT_EQ(loaded.refusal.find('\n'), std::string::npos);
}

TEST(MpiModule, TheModuleOfAnotherVersionIsRefused) {
  const LoadedMpi loaded = load_mpi(Paths{BALLAST_OTHER_MODULE});
  EXPECT_EQ(loaded.calls, nullptr);
  EXPECT_NE(loaded.refusal.find("it belongs to ballast 0.0.0 (interface 0), but this program is "
                                "ballast "),
            std::string::npos)
      << loaded.refusal;
}

}  // namespace
}  // namespace ballast::comm::mpi_loading_test
