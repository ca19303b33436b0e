#include "src/comm/mpi_loading.h"

#include <cstdlib>
#include <string_view>
#include <system_error>

#include <dlfcn.h>
#include <fmt/format.h>
#include <link.h>

#include "ballast/comm/communicator.h"
#include "ballast/core/machine.h"

#include "src/device/shared_library.h"

namespace ballast::comm {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kModule = "ballast_mpi.so";
constexpr std::string_view kRemedy =
    "install an MPI library with its headers, then build the program or the package again";

std::string places_text(std::span<const fs::path> places) {
  std::string text;
  for (std::size_t i = 0; i < places.size(); ++i) {
    text += fmt::format("{}{}",
                        i == 0                   ? ""
                        : i + 1 == places.size() ? " or "
                                                 : ", ",
                        places[i].parent_path().string());
  }
  return text;
}

/// Returns why the module cannot be used, or "" and its table.
std::string table_of(device::Symbols& symbols, const MpiTable*& table) {
  MpiVersionFunction version = nullptr;
  MpiTableFunction calls = nullptr;
  symbols.find(kMpiVersionSymbol, version);
  symbols.find(kMpiTableSymbol, calls);
  if (!symbols.missing().empty()) return "";  // load_one() reports it
  const std::string own =
      fmt::format("{} (interface {})", ballast::version(), BALLAST_MPI_INTERFACE);
  if (version() != own) {
    return fmt::format("it belongs to ballast {}, but this program is ballast {}", version(), own);
  }
  table = calls();
  return "";
}

/// Returns the file that holds this code: the program, or the extension module of the Python
/// package.
fs::path own_file() {
  Dl_info unused = {};
  void* map = nullptr;
  const bool known =
      dladdr1(reinterpret_cast<const void*>(&own_file), &unused, &map, RTLD_DL_LINKMAP) != 0 &&
      map != nullptr;
  const std::string name = known ? static_cast<const link_map*>(map)->l_name : "";
  std::error_code error;
  return name.empty() ? fs::read_symlink("/proc/self/exe", error) : fs::absolute(name, error);
}

}  // namespace

std::vector<fs::path> mpi_module_places(const fs::path& program) {
  if (const char* const named = std::getenv("BALLAST_MPI_MODULE"); named != nullptr) {
    return {fs::path(named)};
  }
  const fs::path folder = program.parent_path();
  std::vector<fs::path> places;
  for (const fs::path& place : {folder, folder / "../lib", folder / BALLAST_LIBRARIES_FROM_BIN}) {
    places.push_back(place.lexically_normal() / kModule);
  }
  return places;
}

LoadedMpi load_mpi(std::span<const fs::path> places) {
  for (const fs::path& place : places) {
    std::error_code error;
    if (!fs::exists(place, error)) continue;
    LoadedMpi loaded;
    // MPI libraries load plugins that look up the library's symbols.
    const std::string refusal =
        device::load_one(place.string(), device::Scope::all, [&](device::Symbols& symbols) {
          std::string reason = table_of(symbols, loaded.calls);
          loaded.file = symbols.file();
          return reason;
        });
    if (refusal.empty()) return loaded;
    return {.refusal = fmt::format("its MPI module {} cannot be used: {}; install the module that "
                                   "was built with this program and the MPI library that it needs",
                                   place.string(), refusal)};
  }
  return {.refusal = fmt::format("its MPI module {} is not in {}; {}", kModule, places_text(places),
                                 kRemedy)};
}

const LoadedMpi& loaded_mpi() {
  static const LoadedMpi once = [] { return load_mpi(mpi_module_places(own_file())); }();
  return once;
}

std::string mpi_refusal() {
  return loaded_mpi().refusal;
}

std::string mpi_file() {
  return loaded_mpi().file;
}

}  // namespace ballast::comm
