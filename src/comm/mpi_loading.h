#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "src/comm/mpi_table.h"

namespace ballast::comm {

/// The MPI module of this program, or the reason in one line why there is none.
struct LoadedMpi {
  const MpiTable* calls = nullptr;
  std::string file;
  std::string refusal;
};

/// Returns possible places of the module for the program `program` (an absolute path): next to it,
/// in ../lib, and in the library folder of an installation. The environment variable
/// BALLAST_MPI_MODULE replaces all of them.
std::vector<std::filesystem::path> mpi_module_places(const std::filesystem::path& program);

/// Loads the first module that exists in `places`. It stays loaded.
LoadedMpi load_mpi(std::span<const std::filesystem::path> places);

/// Returns the module of this program, loaded once.
const LoadedMpi& loaded_mpi();

}  // namespace ballast::comm
