#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/statvfs.h>

#include "ballast/core/cpu.h"

#include "tools/commands/doctor.h"

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

}  // namespace ballast::tools
