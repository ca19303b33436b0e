#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace ballast::tools {

class Command;

/// Values of --device, for --help.
inline constexpr const char* kBenchDevices = "auto (cuda if there is a GPU), host or cuda";

/// "host" or "cuda" for the --device option of `command`. Throws Error for an unknown or missing
/// device.
std::string bench_device(const std::string& command, const std::string& asked);

/// Adds --repeats and --seconds, the lower limits of a measurement, to `command`.
void add_limits(Command command, std::uint64_t& repeats, double& seconds);

/// Deterministic token ids below `vocab`.
std::vector<std::int32_t> random_ids(std::size_t count, std::uint64_t vocab, std::uint64_t stream);

/// Shortest duration of the operations between two waits, so that starting and waiting are
/// negligible.
inline constexpr double kShortestSeconds = 0.02;

/// Seconds that `work()` takes.
double seconds_of(const auto& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace ballast::tools
