#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/clocks.h"
#include "ballast/core/error.h"
#include "ballast/device/device.h"
#include "ballast/memory/machine.h"
#include "ballast/text/json.h"

#include "tools/bench/bench.h"
#include "tools/bench/link_copies.h"
#include "tools/command_line.h"
#include "tools/signals.h"

namespace ballast::tools {
namespace {

using device::CopyWay;

struct BenchLinkArguments {
  std::string device = "auto";
  std::vector<std::string> bytes = {"1MiB", "16MiB", "64MiB", "256MiB"};
  std::uint64_t repeats = 7;
  double seconds = 1.0;
  bool json = false;
};

struct LinkResult {
  CopyWay way = CopyWay::up;
  Bytes bytes = 0;         ///< size of a copy
  std::size_t copies = 0;  ///< copies per wait and direction
  std::uint64_t rounds = 0;
  double seconds = 0.0;          ///< median of `copies` through the device
  double ceiling_seconds = 0.0;  ///< median of `copies` plain ones
  double share = 0.0;            ///< median over the rounds

  /// Bytes in both directions together.
  [[nodiscard]] double moved() const {
    const double ways = way == CopyWay::both ? 2.0 : 1.0;
    return ways * static_cast<double>(bytes) * static_cast<double>(copies);
  }
  [[nodiscard]] double gb_per_second() const { return moved() / seconds * 1e-9; }
  [[nodiscard]] double ceiling_gb_per_second() const { return moved() / ceiling_seconds * 1e-9; }
};

constexpr std::array<CopyWay, 3> kWays = {CopyWay::up, CopyWay::down, CopyWay::both};
constexpr std::size_t kMaxCopies = std::size_t{1} << 16U;

const char* name_of(CopyWay way) {
  switch (way) {
    case CopyWay::up:
      return "upload";
    case CopyWay::down:
      return "offload";
    case CopyWay::both:
      return "both";
  }
  return "";
}

/// Sizes of copies, checked before anything is allocated. Throws Error.
std::vector<Bytes> sizes_of(const BenchLinkArguments& arguments, const std::string& kind) {
  // Four buffers for copies on the host; the host device's own four are host memory, too.
  const Bytes places = kind == "host" ? 8 : 4;
  const Bytes available = memory::available_memory();
  std::vector<Bytes> sizes;
  for (const auto& text : arguments.bytes) {
    const Bytes bytes = parse_bytes(text);
    if (bytes == 0) {
      throw Error(ErrorCategory::usage, "bench link: --bytes " + text + ": give at least 1");
    }
    if (bytes > available / places) {
      throw Error(ErrorCategory::memory,
                  fmt::format("bench link: --bytes {} needs {} times that, and {} is free; "
                              "--bytes {}MiB would fit",
                              text, places, format_bytes(available), available / places / kMiB));
    }
    sizes.push_back(bytes);
  }
  return sizes;
}

/// Returns the number of copies that is long enough for a measurement. Also warms up.
std::size_t enough_copies(device::PlainCopies& plain, CopyWay way) {
  std::size_t count = 1;
  while (count < kMaxCopies && seconds_of([&] { plain.run(way, count); }) < kShortestSeconds) {
    count *= 2;
  }
  return count;
}

/// Measures copies through the device between plain copies. The faster plain ones are the ceiling,
/// since the others were disturbed.
LinkResult measure(LinkCopies& link, device::PlainCopies& plain, LinkResult subject,
                   const BenchLinkArguments& arguments) {
  const CopyWay way = subject.way;
  subject.copies = enough_copies(plain, way);
  link.run(way, subject.copies);
  std::vector<double> own;
  std::vector<double> ceiling;
  std::vector<double> shares;
  double total = 0.0;
  while (shares.size() < arguments.repeats || total < arguments.seconds) {
    if (interrupted()) throw Error(ErrorCategory::interrupted, "interrupted");
    const auto measure_plain = [&] { return seconds_of([&] { plain.run(way, subject.copies); }); };
    const double before = measure_plain();
    own.push_back(seconds_of([&] { link.run(way, subject.copies); }));
    const double after = measure_plain();
    ceiling.push_back(std::min(before, after));
    shares.push_back(ceiling.back() / own.back());
    total += before + own.back() + after;
  }
  subject.rounds = shares.size();
  subject.seconds = quantile(own, 0.5);
  subject.ceiling_seconds = quantile(ceiling, 0.5);
  subject.share = quantile(shares, 0.5);
  return subject;
}

void print_head(device::Device& device) {
  fmt::print("{}\n{}\n\n", device.description(), memory::describe(memory::read_topology()));
  fmt::print("  {:>10} {:<8} {:>7} {:>7} {:>8} {:>9} {:>7}\n", "bytes", "way", "copies", "rounds",
             "GB/s", "ceiling", "share");
  std::fflush(stdout);
}

void print_row(const LinkResult& result) {
  fmt::print("  {:>10} {:<8} {:>7} {:>7} {:>8.2f} {:>9.2f} {:>6.1f}%\n", format_bytes(result.bytes),
             name_of(result.way), result.copies, result.rounds, result.gb_per_second(),
             result.ceiling_gb_per_second(), 100.0 * result.share);
  std::fflush(stdout);
}

text::Json json_of(const LinkResult& result, const std::string& kind) {
  return text::Json::object({{"device", kind},
                             {"way", name_of(result.way)},
                             {"bytes", result.bytes},
                             {"copies", result.copies},
                             {"repeats", result.rounds},
                             {"median_seconds", result.seconds},
                             {"gb_per_second", result.gb_per_second()},
                             {"ceiling_gb_per_second", result.ceiling_gb_per_second()},
                             {"percent_of_ceiling", 100.0 * result.share}});
}

void run_bench_link(const BenchLinkArguments& arguments) {
  const std::string kind = bench_device("bench link", arguments.device);
  text::Json json = text::Json::array();
  bool headed = arguments.json;
  for (const Bytes bytes : sizes_of(arguments, kind)) {
    LinkCopies link(kind, bytes, "bench link");
    const auto plain = device::make_plain_copies(link.device(), bytes);
    if (!headed) print_head(link.device());
    headed = true;
    for (const CopyWay way : kWays) {
      const LinkResult result = measure(link, *plain, {.way = way, .bytes = bytes}, arguments);
      if (!arguments.json) print_row(result);
      json.push_back(json_of(result, kind));
    }
    link.check();
  }
  if (arguments.json) fmt::print("{}\n", json.pretty(1));
}

}  // namespace

void add_bench_link(Command bench) {
  auto arguments = std::make_shared<BenchLinkArguments>();
  auto& a = *arguments;
  Command command = bench.add_command(
      "link", "Copies to and from the device as a share of plain copies without the engine");
  command.add_option("--device", &a.device, kBenchDevices,
                     {.values = {"auto", "host", "cuda"}, .show_default = true});
  command.add_option("--bytes", &a.bytes,
                     "Bytes per copy, for example 16MiB (default: 1MiB,16MiB,64MiB,256MiB)",
                     {.commas = true, .single_argument = true});
  add_limits(command, a.repeats, a.seconds);
  command.add_flag("--json", &a.json, "Print a JSON array");
  command.set_action([arguments] { run_bench_link(*arguments); });
}

}  // namespace ballast::tools
