#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>

#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/statvfs.h>

#include "ballast/aio/file.h"
#include "ballast/aio/queue.h"
#include "ballast/calibrate/machine_files.h"
#include "ballast/core/error.h"
#include "ballast/core/machine.h"
#include "ballast/core/memory.h"

#include "tools/commands/doctor.h"
#include "tools/commands/requests.h"

namespace ballast::tools {

namespace {

/// io_uring registers the buffers of transfers, which the kernel counts as locked memory.
Finding check_locked_memory() {
  constexpr Bytes kEnough = 8 * kGiB;
  rlimit limit = {};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return {.name = "locked memory", .text = "unknown"};
  const bool unlimited = limit.rlim_cur == RLIM_INFINITY;
  Finding finding = {
      .name = "locked memory",
      .text = unlimited ? "unlimited" : format_bytes(Bytes{limit.rlim_cur}) + " (ulimit -l)"};
  if (unlimited || limit.rlim_cur >= kEnough) return finding;
  finding.severity = Severity::hint;
  finding.text +=
      "; transfers to and from NVMe are faster if their buffers may be locked: "
      "ulimit -l unlimited, or memlock in /etc/security/limits.conf";
  return finding;
}

/// A file above the limit would end a run when it is written, perhaps after hours.
Finding check_file_size(Bytes largest) {
  rlimit limit = {};
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
    return {.name = "file size", .text = "unlimited"};
  }
  const bool enough = limit.rlim_cur >= largest;
  return {.severity = enough ? Severity::hint : Severity::fault,
          .name = "file size",
          .text = fmt::format(
              "{} (ulimit -f); {}: ulimit -f unlimited", format_bytes(Bytes{limit.rlim_cur}),
              enough ? "larger swap files, checkpoints and weights cannot be written"
                     : fmt::format("a run writes files of about {}", format_bytes(largest)))};
}

Finding check_open_files() {
  constexpr rlim_t kNeeded = 16;
  constexpr rlim_t kEnough = 512;
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return {.name = "open files", .text = "unknown"};
  Finding finding = {.name = "open files",
                     .text = limit.rlim_cur == RLIM_INFINITY
                                 ? "unlimited"
                                 : fmt::format("{} (ulimit -n)", limit.rlim_cur)};
  if (limit.rlim_cur >= kEnough) return finding;
  finding.severity = limit.rlim_cur < kNeeded ? Severity::fault : Severity::hint;
  finding.text += fmt::format(
      "; a run opens about {} files and each file of its data, and MPI more: ulimit -n 4096",
      kNeeded);
  return finding;
}

/// Starts the number of threads of a run, since limits of users, groups and sandboxes differ.
Finding check_threads(int wanted) {
  constexpr int kLanesAndQueues = 16;
  const int needed = wanted + kLanesAndQueues;
  std::mutex mutex;
  std::condition_variable ended;
  bool end = false;
  std::vector<std::thread> threads;
  std::string why;
  try {
    for (int i = 0; i < needed; ++i) {
      threads.emplace_back([&] {
        std::unique_lock lock(mutex);
        ended.wait(lock, [&] { return end; });
      });
    }
  } catch (const std::system_error& error) {
    why = error.code().message();
  }
  {
    const std::lock_guard lock(mutex);
    end = true;
  }
  ended.notify_all();
  for (std::thread& thread : threads) thread.join();
  if (why.empty()) return {.name = "threads", .text = fmt::format("{} can be started", needed)};
  return {
      .severity = Severity::fault,
      .name = "threads",
      .text = fmt::format("only {} of {} can be started ({}); raise ulimit -u, ulimit -v or the "
                          "pids limit of this container, or set ballast.compute_threads and "
                          "ballast.update_threads to less",
                          threads.size(), needed, why)};
}

/// MPI and NCCL exchange data of ranks of one machine there.
Finding check_shared_memory() {
  constexpr Bytes kEnough = 64 * kMiB;
  constexpr const char* kPlace = "/dev/shm";
  constexpr const char* kUse = "only several ranks on this machine need it";
  struct statvfs space = {};
  if (statvfs(kPlace, &space) != 0) {
    return {Severity::hint, "shared memory", fmt::format("there is no {}; {}", kPlace, kUse)};
  }
  const Bytes free = Bytes{space.f_bavail} * space.f_frsize;
  const std::string text = fmt::format("{}: {} free", kPlace, format_bytes(free));
  if (free >= kEnough) return {.name = "shared memory", .text = text};
  return {Severity::hint, "shared memory",
          fmt::format("{}; {}: mount -o remount,size=1g {}, or docker run --shm-size=1g", text,
                      kUse, kPlace)};
}

}  // namespace

std::vector<Finding> examine_limits(const MachineUse& use) {
  const int threads = use.threads > 0 ? use.threads : 2 * usable_cpus();
  return {check_locked_memory(), check_file_size(use.largest_file), check_open_files(),
          check_threads(threads), check_shared_memory()};
}

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
