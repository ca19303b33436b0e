#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "ballast/text/json.h"

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

class Command;

struct PageFile {
  std::filesystem::path path;  ///< empty: no page
  bool overwrite = false;      ///< whether to replace a file that is not a page
};

/// The page of `ballast bench NAME --html`, with the figures of earlier runs on this machine. They
/// are kept in $XDG_CACHE_HOME/ballast/bench-NAME-HASH.json (calibrate/machine_files.h), where HASH
/// identifies host and processor: the latest runs, at most 50 and less than 1 MiB.
class BenchPage {
 public:
  /// Adds --html and --overwrite to `command`.
  static void add_options(Command command, PageFile& file);

  /// Throws like text::check_output().
  BenchPage(std::string bench, PageFile file);
  /// Writes the page of `rows`, an array of figures (--json), and keeps them. If they cannot be
  /// kept, prints a warning. `announce`: prints where the page is. Throws like text::OutputFile.
  void write(const text::Json& rows, bool announce) const;

 private:
  std::string bench_;
  PageFile file_;
};

/// Options of `ballast bench io`.
struct BenchIoArguments {
  std::vector<std::string> paths;
  std::vector<std::string> patterns = {"read", "write", "mixed"};
  std::vector<std::string> blocks = {"1MiB"};
  std::vector<unsigned> depths = {32};
  std::vector<std::string> backends = {"auto"};
  std::string size = "2GiB";
  std::optional<double> seconds;
  bool sqpoll = false;
  bool iopoll = false;
  bool buffered = false;
  bool check = false;
  bool list_backends = false;
  bool json = false;
  std::string job;
  PageFile html;
};

/// Measures all combinations and returns a JSON array with one object per combination. Prints a
/// table unless `arguments.json`. Throws Error.
text::Json bench_io(const BenchIoArguments& arguments);

}  // namespace ballast::tools
