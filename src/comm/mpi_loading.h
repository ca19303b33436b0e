#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "ballast/core/units.h"

namespace ballast::comm {

// The interface between the program and its MPI module, ballast_mpi.so. MPI libraries differ in
// their binary interface, so only the module is compiled and linked with one, and only C types
// cross this border. The program loads the module when it joins a run of several ranks. Functions
// return MPI's error code, 0 for success, unless stated otherwise.

/// Memory for an MPI_Comm or an MPI_Request of any MPI library.
struct MpiHandle {
  alignas(void*) std::byte memory[sizeof(void*)] = {};
};

/// The unit of counts. With pages (kPage bytes), counts of buffers up to 8 TiB fit an int.
enum class MpiUnit : int { byte, page };

/// Calls of MPI. Those with a `request` start a nonblocking operation of the communicator; its
/// memory may be used only after test() reports that it is done.
struct MpiTable {
  /// Returns whether MPI was started in this process, by anyone.
  int (*started)(int* yes);
  /// Starts MPI for calls from many threads; *threads is 0 if MPI does not support that. Later
  /// failures of MPI are returned.
  int (*start)(int* threads);
  int (*finish)();
  /// Ends all processes of the run.
  void (*abort)(int status);

  int (*place)(int* rank, int* world);
  /// Write the text of an error code, or the name of the MPI library, as a string of at most `size`
  /// bytes. They return nothing.
  void (*describe_error)(int code, char* text, std::size_t size);
  void (*describe_library)(char* text, std::size_t size);

  /// Makes a communicator of all ranks. `made` must not move until the request is done.
  int (*duplicate_world)(MpiHandle* made, MpiHandle* request);
  /// Makes a communicator of the ranks with the same `color`, ordered by `key`. Blocks.
  int (*split_world)(int color, int key, MpiHandle* made);
  int (*release)(MpiHandle* communicator);
  int (*world_barrier)(MpiHandle* request);
  int (*test)(MpiHandle* request, int* done);

  int (*barrier)(const MpiHandle* communicator, MpiHandle* request);
  /// `from` null: this rank's part is in place in `to`. `count`: size of one rank's part.
  int (*all_gather)(const MpiHandle* communicator, const void* from, void* to, int count,
                    MpiUnit unit, MpiHandle* request);
  /// Gathers in place; numbers of pages and page offsets by rank.
  int (*all_gather_parts)(const MpiHandle* communicator, void* whole, const int* counts,
                          const int* places, MpiHandle* request);
  /// Sends to and receives from every rank; numbers of pages and page offsets by rank.
  int (*exchange)(const MpiHandle* communicator, const void* sent, const int* sent_counts,
                  const int* sent_places, void* received, const int* received_counts,
                  const int* received_places, MpiHandle* request);
  /// Sends `bytes` bytes to one rank, or receives them.
  int (*send)(const MpiHandle* communicator, const void* data, int bytes, int to,
              MpiHandle* request);
  int (*receive)(const MpiHandle* communicator, void* data, int bytes, int from,
                 MpiHandle* request);
  int (*broadcast)(const MpiHandle* communicator, void* data, int count, MpiUnit unit, int root,
                   MpiHandle* request);
};

// Exports of the module, with C linkage. The version comes first, because the table of another
// version may differ: "0.2.0 (interface 2)".
inline constexpr const char* kMpiVersionSymbol = "ballast_mpi_version";
inline constexpr const char* kMpiTableSymbol = "ballast_mpi_table";
using MpiVersionFunction = const char* (*)();
using MpiTableFunction = const MpiTable* (*)();

/// Increases whenever MpiTable changes.
#define BALLAST_MPI_INTERFACE "3"

/// The MPI module of this program, or the reason in one line why there is none.
struct LoadedMpi {
  const MpiTable* calls = nullptr;
  std::string file;
  std::string refusal;
};

/// Returns possible places of the module for the program `program` (an absolute path), or for the
/// extension module of the Python package: next to it, in ../lib, and in the library folder of an
/// installation. The environment variable BALLAST_MPI_MODULE replaces all of them.
std::vector<std::filesystem::path> mpi_module_places(const std::filesystem::path& program);

/// Loads the first module that exists in `places`. It stays loaded.
LoadedMpi load_mpi(std::span<const std::filesystem::path> places);

/// Returns the module of this program, loaded once.
const LoadedMpi& loaded_mpi();

}  // namespace ballast::comm
