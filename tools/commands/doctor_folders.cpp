#include <algorithm>
#include <cstring>
#include <system_error>

#include <fmt/format.h>

#include "ballast/aio/file_system.h"
#include "ballast/aio/queue.h"
#include "ballast/calibrate/machine_files.h"
#include "ballast/core/error.h"
#include "ballast/core/mapping.h"

#include "tools/commands/doctor.h"
#include "tools/commands/run_directory.h"

namespace ballast::tools {
namespace {

namespace fs = std::filesystem;

/// Returns the folder, or its nearest existing parent.
fs::path existing(fs::path folder) {
  std::error_code ignored;
  if (folder.is_relative()) folder = fs::absolute(folder, ignored);
  while (folder.has_relative_path() && !fs::exists(fs::symlink_status(folder, ignored))) {
    folder = folder.parent_path();
  }
  return folder;
}

/// Writes and reads a nameless file as a run does. Throws Error(io).
void try_swap(const fs::path& folder, const state::SwapPath& path, aio::File::Access access) {
  constexpr std::size_t kTrial = 1 * kMiB;
  const Mapping memory(2 * kTrial, "testing a swap folder");
  const HostBytes written = memory.bytes().first(kTrial);
  const HostBytes read = memory.bytes().subspan(kTrial, kTrial);
  for (std::size_t i = 0; i < kTrial; ++i) written[i] = static_cast<std::byte>(i * i >> 7U);
  const aio::File file = aio::File::create_anonymous(folder, kTrial, access);
  const auto queue = aio::make_queue(path.io);
  for (const auto direction : {aio::Direction::write, aio::Direction::read}) {
    const HostBytes place = direction == aio::Direction::write ? written : read;
    const aio::Ticket ticket =
        queue->submit({.direction = direction, .file = &file, .offset = 0, .memory = place});
    queue->wait(ticket).check("testing a swap folder");
    if (direction == aio::Direction::write) file.sync();
  }
  if (std::memcmp(written.data(), read.data(), kTrial) == 0) return;
  throw Error(
      ErrorCategory::io,
      fmt::format("{}: the disk returned different bytes than were written; check the drive",
                  folder.string()));
}

std::string describe(const fs::path& folder, const fs::path& place, const aio::FileSystem& system) {
  return fmt::format("{}: {}{}, {} free", folder.string(),
                     place == folder ? "" : "will be made on ", system.type,
                     system.free ? format_bytes(*system.free) : "unknown space");
}

Finding check_swap_folder(const state::SwapPath& path, const state::SwapOptions& options) {
  constexpr Bytes kLittle = 10 * kGiB;
  Finding finding = {.name = "swap folder"};
  const fs::path place = path.existing();
  try {
    const aio::FileSystem system = aio::inspect_file_system(place);
    finding.text = describe(path.directory, place, system);
    if (const std::string why = aio::unsuited_for_swap(system, place); !why.empty()) {
      finding.severity = options.any_file_system ? Severity::hint : Severity::fault;
      finding.text = why;
    } else if (system.free == Bytes{0}) {
      finding.severity = Severity::fault;
      finding.text += "; nothing can be swapped or saved there: free some space";
      return finding;
    } else if (system.free && *system.free < kLittle) {
      finding.severity = Severity::hint;
      finding.text += "; optimizer states need 12 bytes per parameter";
    }
    if (finding.severity != Severity::fault) try_swap(place, path, options.access);
  } catch (const Error& error) {
    finding.severity = Severity::fault;
    finding.text = error.what();
  }
  return finding;
}

Finding check_run_directory(const fs::path& directory) {
  const fs::path place = existing(directory);
  try {
    aio::File::check_anonymous(place, 0, aio::File::Access::buffered);
    return {.name = "run directory",
            .text = describe(directory, place, aio::inspect_file_system(place))};
  } catch (const Error& error) {
    return {Severity::fault, "run directory",
            fmt::format("{}; choose another with --out or ballast.out", error.what())};
  }
}

/// Folder of the measured rates.
Finding check_cache() {
  constexpr const char* kUse = "each plan measures this machine again";
  const fs::path folder = calibrate::machine_file("rates", "").parent_path();
  if (folder.empty()) {
    return {Severity::hint, "cache",
            fmt::format("neither HOME nor XDG_CACHE_HOME is set; {}", kUse)};
  }
  try {
    aio::File::check_anonymous(existing(folder), 0, aio::File::Access::buffered);
    return {.name = "cache", .text = folder.string()};
  } catch (const Error& error) {
    return {
        Severity::hint, "cache",
        fmt::format("{}; {}: set XDG_CACHE_HOME to a folder that is writable", error.what(), kUse)};
  }
}

}  // namespace

std::vector<Finding> examine_folders(const MachineUse& use) {
  std::vector<Finding> findings;
  const fs::path run =
      use.run_directory.empty() ? default_run_directory("run").parent_path() : use.run_directory;
  for (state::SwapPath path : use.swap.paths) {
    if (path.directory.empty()) path.directory = run;
    findings.push_back(check_swap_folder(path, use.swap));
  }
  findings.push_back(check_run_directory(run));
  findings.push_back(check_cache());
  return findings;
}

}  // namespace ballast::tools
