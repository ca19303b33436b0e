#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "ballast/aio/queue.h"
#include "ballast/core/error.h"
#include "ballast/memory/machine.h"
#include "ballast/text/json.h"

#include "tools/bench/bench.h"
#include "tools/command_line.h"
#include "tools/io_load/load.h"
#include "tools/signals.h"

namespace ballast::tools {
namespace {

using text::Json;

constexpr const char* kTask = "bench io";

/// The measurements. Checked before any file is created.
struct Sweep {
  std::vector<std::filesystem::path> paths;
  Bytes size = 0;
  aio::File::Access access = aio::File::Access::direct;
  std::vector<IoLoad> loads;

  /// Number of concurrent queues.
  [[nodiscard]] std::size_t regions() const { return std::max<std::size_t>(1, paths.size()); }
};

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCategory::usage, fmt::format("{}: {}", kTask, message));
}

bool moves_nothing(const IoLoad& load) {
  return load.backend == "null";
}

void check_load(const IoLoad& load, Bytes size) {
  const std::string block = format_bytes(load.block);
  if (load.block == 0 || load.block % kPage != 0 || load.block > kGiB) {
    refuse(fmt::format("--block: must be a multiple of 4 KiB up to 1 GiB, got {} ({} bytes)", block,
                       load.block));
  }
  // Requests would overlap otherwise.
  if (size / load.block < load.depth) {
    refuse(fmt::format("--size {} holds {} blocks of {}, too few for depth {}; give at least {}",
                       format_bytes(size), size / load.block, block, load.depth,
                       format_bytes(load.buffer_bytes())));
  }
  if (load.check && load.pattern == IoPattern::copy) {
    refuse("--check: a copy is not read back; leave out --pattern copy");
  }
  if (load.check && moves_nothing(load)) {
    refuse("--check: the null backend moves no data to check");
  }
}

void check_memory(const Sweep& sweep) {
  const Bytes available = memory::available_memory();
  for (const IoLoad& load : sweep.loads) {
    const Bytes content = IoContent::bytes_needed(sweep.size);
    const Bytes needed = sweep.regions() * (load.buffer_bytes() + content);
    if (needed <= available) continue;
    throw Error(ErrorCategory::memory,
                fmt::format("{}: blocks of {} at depth {} on {} path{} need {} of memory and {} is "
                            "free; give a smaller --block or --depth",
                            kTask, format_bytes(load.block), load.depth, sweep.regions(),
                            sweep.regions() == 1 ? "" : "s", format_bytes(needed),
                            format_bytes(available)));
  }
}

void check_backends(const std::vector<std::string>& names) {
  // The queue reports unknown and unusable backends.
  for (const std::string& name : names) {
    aio::QueueOptions options;
    options.backend = name;
    options.depth = 1;
    aio::make_queue(options);
  }
}

Sweep make_sweep(const BenchIoArguments& a) {
  Sweep sweep;
  sweep.size = round_up(read_size(a.size, "bench io: --size"), kMiB);
  if (sweep.size == 0 || sweep.size > IoContent::kLargestFile) {
    refuse(fmt::format("--size: must be from 1 MiB to {}, got {}",
                       format_bytes(IoContent::kLargestFile), a.size));
  }
  if (a.buffered) {
    sweep.access = aio::File::Access::buffered;
    if (a.iopoll) refuse("--iopoll: works with direct I/O only; leave out --buffered");
  }
  std::vector<IoPattern> patterns;
  for (const std::string& name : a.patterns) patterns.push_back(parse_io_pattern(name));
  for (const std::string& backend : a.backends) {
    for (const IoPattern pattern : patterns) {
      for (const std::string& block : a.blocks) {
        for (const unsigned depth : a.depths) {
          sweep.loads.push_back({.pattern = pattern,
                                 .block = read_size(block, "bench io: --block"),
                                 .depth = depth,
                                 .backend = backend,
                                 .sqpoll = a.sqpoll,
                                 .iopoll = a.iopoll,
                                 .seconds = a.seconds,
                                 .check = a.check});
          check_load(sweep.loads.back(), sweep.size);
        }
      }
    }
  }
  sweep.paths = measured_paths(a.paths, kTask);
  if (sweep.paths.empty() && !std::all_of(sweep.loads.begin(), sweep.loads.end(), moves_nothing)) {
    refuse("name a folder on the disk to measure with --path; only --backend null needs none");
  }
  check_backends(a.backends);
  check_memory(sweep);
  return sweep;
}

Json json_of(const IoLoad& load, const IoResult& result,
             const std::vector<std::filesystem::path>& paths) {
  Json names = Json::array();
  for (const auto& path : paths) names.push_back(path.string());
  return Json::object({{"pattern", to_string(load.pattern)},
                       {"block_bytes", load.block},
                       {"depth", load.depth},
                       {"paths", names},
                       {"backend", result.backend},
                       {"gb_per_second", result.gb_per_second()},
                       {"median_ms", 1e3 * result.median_seconds},
                       {"p99_ms", 1e3 * result.p99_seconds},
                       {"cpu_seconds_per_gb", result.cpu_seconds_per_gb()},
                       {"checked", load.check},
                       {"bound", load.seconds ? "time" : "size"},
                       {"seconds", result.seconds},
                       {"bytes", result.bytes()},
                       {"bytes_read", result.bytes_read},
                       {"bytes_written", result.bytes_written},
                       {"cpu_seconds", result.cpu_seconds},
                       {"blocks_per_submit", result.blocks_per_batch()}});
}

void print_head(const Sweep& sweep, const BenchIoArguments& a) {
  for (const auto& path : sweep.paths) fmt::print("{}\n", describe_path(path));
  fmt::print("{} per path, {}, {}{}\n", format_bytes(sweep.size),
             a.buffered ? "through the page cache" : "direct I/O",
             a.seconds ? fmt::format("for {} each, in repeated passes", format_seconds(*a.seconds))
                       : std::string("one pass each"),
             a.check ? ", every byte checked (included in CPU time)" : "");
  fmt::print("{:<7} {:<8} {:>8} {:>5} {:>7} {:>8} {:>8} {:>8} {:>6} {:>5}\n", "pattern", "backend",
             "block", "depth", "GB/s", "median", "p99", "CPU s/GB", "blocks", "check");
  std::fflush(stdout);
}

void print_row(const IoLoad& load, const IoResult& result) {
  fmt::print("{:<7} {:<8} {:>8} {:>5} {:>7.3f} {:>6.2f}ms {:>6.2f}ms {:>8.4f} {:>6.1f} {:>5}\n",
             to_string(load.pattern), result.backend, format_bytes(load.block), load.depth,
             result.gb_per_second(), 1e3 * result.median_seconds, 1e3 * result.p99_seconds,
             result.cpu_seconds_per_gb(), result.blocks_per_batch(), load.check ? "ok" : "-");
  std::fflush(stdout);
}

void print_foot(const Sweep& sweep) {
  fmt::print(
      "GB/s: 10^9 bytes per second{}; mixed and copy count both reads and writes.\n"
      "blocks: mean number per submission to the backend.\n",
      sweep.paths.size() > 1 ? ", all paths together" : "");
}

std::vector<IoRegion> make_regions(const Sweep& sweep) {
  std::vector<IoRegion> regions;
  if (std::all_of(sweep.loads.begin(), sweep.loads.end(), moves_nothing)) return regions;
  for (const auto& path : sweep.paths) {
    regions.emplace_back(path, static_cast<unsigned>(regions.size()), sweep.size, sweep.access);
  }
  return regions;
}

std::vector<IoRegion> make_placeholders(const Sweep& sweep) {
  std::vector<IoRegion> regions;
  if (std::none_of(sweep.loads.begin(), sweep.loads.end(), moves_nothing)) return regions;
  for (std::size_t i = 0; i < sweep.regions(); ++i) {
    regions.push_back(IoRegion::placeholder(sweep.size));
  }
  return regions;
}

void print_backends(bool json) {
  Json rows = Json::array();
  for (const aio::Backend& backend : aio::probe_backends()) {
    if (json) {
      rows.push_back(Json::object(
          {{"backend", backend.name}, {"usable", backend.usable}, {"reason", backend.reason}}));
    } else {
      fmt::print("{:<9} {:<8} {}\n", backend.name, backend.usable ? "usable" : "refused",
                 backend.reason);
    }
  }
  if (json) fmt::print("{}\n", rows.pretty(1));
}

void add_options(Command command, BenchIoArguments& a) {
  command.add_option(
      "--path", &a.paths,
      "Folder on the disk to measure; several are measured at once, with a queue each",
      {.single_argument = true, .takes = Names::folder});
  command.add_option(
      "--pattern", &a.patterns,
      "read, write, mixed: each block is read and written back; or copy: it is "
      "written to a new file",
      {.commas = true, .single_argument = true, .values = {"read", "write", "mixed", "copy"}});
  command.add_option("--block", &a.blocks, "Size of a request",
                     {.commas = true, .single_argument = true, .value = "SIZE", .initial = "1MiB"});
  command.add_option("--depth", &a.depths, "Requests outstanding per path",
                     {.commas = true, .single_argument = true, .range = std::pair(1, 16384)});
  command.add_option(
      "--backend", &a.backends,
      "auto, io_uring, threads or null, which moves no data and shows the "
      "overhead of the queue",
      {.commas = true, .single_argument = true, .values = {"auto", "io_uring", "threads", "null"}});
  command.add_option("--size", &a.size, "Size of the file on each path",
                     {.value = "SIZE", .show_default = true});
  command.add_option("--seconds", &a.seconds,
                     "Time of each measurement, in seconds (default: one pass over the file)",
                     {.range = std::pair(0.01, 86400.0)});
  command.add_flag("--sqpoll", &a.sqpoll, "io_uring: a kernel thread submits");
  command.add_flag("--iopoll", &a.iopoll, "io_uring: poll for completions");
  command.add_flag("--buffered", &a.buffered, "Use the page cache instead of direct I/O");
  command.add_flag("--check", &a.check, "Compare all data read, and read back all writes");
  command.add_flag("--json", &a.json, "Print a JSON array");
}

}  // namespace

Json bench_io(const BenchIoArguments& a) {
  const Sweep sweep = make_sweep(a);
  const BenchPage page("io", a.html);
  std::vector<IoRegion> files = make_regions(sweep);
  std::vector<IoRegion> placeholders = make_placeholders(sweep);
  if (!a.json) print_head(sweep, a);
  const auto mover = std::find_if_not(sweep.loads.begin(), sweep.loads.end(), moves_nothing);
  if (mover != sweep.loads.end()) fill_regions(files, mover->backend, kTask, interrupted());
  Json json = Json::array();
  for (const IoLoad& load : sweep.loads) {
    std::vector<IoRegion>& regions = moves_nothing(load) ? placeholders : files;
    const IoResult result = run_load(load, regions, kTask, interrupted());
    if (load.check && load.pattern != IoPattern::read) {
      verify_regions(load, regions, kTask, interrupted());
    }
    if (!a.json) print_row(load, result);
    json.push_back(json_of(load, result, sweep.paths));
  }
  if (!a.json) print_foot(sweep);
  page.write(json, !a.json);
  return json;
}

void add_bench_io(Command bench) {
  auto arguments = std::make_shared<BenchIoArguments>();
  auto& a = *arguments;
  Command command = bench.add_command(
      "io", "Swap throughput of disks (comma-separated lists measure all combinations)");
  add_options(command, a);
  command.add_option("--job", &a.job,
                     "File with one option per line ('block = 256KiB, 1MiB'); the command line "
                     "overrides it",
                     {.takes = Names::file, .extensions = {".ini", ".toml", ".job"}});
  BenchPage::add_options(command, a.html);
  command.add_flag("--backends", &a.list_backends, "List the backends and why each is used or not");
  command.set_action([arguments, command] {
    if (arguments->list_backends) return print_backends(arguments->json);
    if (!arguments->job.empty()) read_job_file(command, arguments->job);
    const Json json = bench_io(*arguments);
    if (arguments->json) fmt::print("{}\n", json.pretty(1));
  });
}

}  // namespace ballast::tools
