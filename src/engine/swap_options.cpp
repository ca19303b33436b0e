#include "src/engine/swap_options.h"

#include <algorithm>
#include <filesystem>
#include <vector>

namespace ballast::engine {
namespace {

std::vector<std::filesystem::path> swap_directories(const config::Config& config) {
  std::vector<std::filesystem::path> found;
  for (const auto* section : {&config.zero.optimizer, &config.zero.parameters}) {
    for (const auto& path : section->nvme_path) {
      if (std::find(found.begin(), found.end(), path) == found.end()) found.push_back(path);
    }
  }
  if (found.empty()) found.push_back(config.ballast.out);
  return found;
}

/// What this process swaps to of the machine's `directories` (at least one).
std::vector<std::filesystem::path> own_of(const std::vector<std::filesystem::path>& directories,
                                          const comm::Launch& launch) {
  if (directories.size() < launch.local_world) {
    return {directories[launch.local_rank % directories.size()]};
  }
  std::vector<std::filesystem::path> own;
  for (std::size_t i = launch.local_rank; i < directories.size(); i += launch.local_world) {
    own.push_back(directories[i]);
  }
  return own;
}

config::AioPath settings_of(const config::AioSection& aio, const std::filesystem::path& directory) {
  for (const auto& entry : aio.paths) {
    if (entry.path == directory) return entry;
  }
  return {.path = directory,
          .block_size = aio.block_size,
          .queue_depth = aio.queue_depth,
          .backend = aio.backend};
}

}  // namespace

state::SwapOptions swap_options(const config::Config& config, const comm::Launch& launch) {
  const config::AioSection& aio = config.aio;
  state::SwapOptions options;
  options.access = aio.buffered ? aio::File::Access::buffered : aio::File::Access::direct;
  options.any_file_system = aio.any_file_system;
  for (const auto& directory : own_of(swap_directories(config), launch)) {
    const config::AioPath entry = settings_of(aio, directory);
    options.paths.push_back({.directory = directory,
                             .io = {.backend = entry.backend,
                                    .block_bytes = entry.block_size,
                                    .depth = entry.queue_depth,
                                    .in_flight_bytes = aio.in_flight_bytes,
                                    .stall_seconds = aio.stall_seconds,
                                    .abandon_seconds = aio.abandon_seconds,
                                    .sqpoll = aio.sqpoll,
                                    .iopoll = aio.iopoll},
                             .read_gbps = entry.read_gbps,
                             .write_gbps = entry.write_gbps,
                             .made_later = directory == config.ballast.out});
  }
  return options;
}

}  // namespace ballast::engine
