#include "tools/bench/bench.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "ballast/calibrate/machine_files.h"
#include "ballast/comm/agreement.h"
#include "ballast/core/error.h"
#include "ballast/core/machine.h"
#include "ballast/core/random.h"
#include "ballast/device/device.h"
#include "ballast/text/files.h"

#include "tools/command_line.h"
#include "tools/report/page.h"

namespace ballast::tools {

void add_bench(Command program) {
  Command bench = program.add_command("bench", "Measure this machine");
  bench.require_command();
  add_bench_adam(bench);
  add_bench_attention(bench);
  add_bench_io(bench);
  add_bench_link(bench);
  add_bench_plan(bench);
  add_bench_step(bench);
}

std::string bench_device(const std::string& command, const std::string& asked) {
  static const std::array<std::string, 3> choices = {"auto", "host", "cuda"};
  if (std::find(choices.begin(), choices.end(), asked) == choices.end()) {
    throw Error(ErrorCategory::usage,
                fmt::format("{}: --device: '{}' is not a device; choose auto, host or cuda{}",
                            command, asked, did_you_mean(asked, choices)));
  }
  if (asked == "host") return asked;
  const std::string refusal = device::gpu_refusal({});
  if (refusal.empty()) return "cuda";
  if (asked == "auto" && !device::has_unusable_gpu({})) return "host";
  throw Error(ErrorCategory::device,
              fmt::format("{}: --device {}: {}; use --device host", command, asked, refusal));
}

void add_limits(Command command, std::uint64_t& repeats, double& seconds) {
  command.add_option("--repeats", &repeats, "Minimum number of measured rounds",
                     {.range = std::pair(1, 1000000), .show_default = true});
  command.add_option("--seconds", &seconds, "Minimum measured time per row, in seconds",
                     {.range = std::pair(0.0, 3600.0), .show_default = true});
}

std::vector<std::int32_t> random_ids(std::size_t count, std::uint64_t vocab, std::uint64_t stream) {
  std::vector<std::int32_t> ids(count);
  for (std::size_t i = 0; i < count; ++i) {
    ids[i] = static_cast<std::int32_t>(random_u64(1, i, stream) % vocab);
  }
  return ids;
}

namespace {

using text::Json;

constexpr std::size_t kMaxRuns = 50;
constexpr std::size_t kMaxBytes = std::size_t{900} << 10U;  // files of settings have at most 1 MiB

/// The runs in `file`, the latest last. Throws Error(config) for a file that has none.
Json read_runs(const std::filesystem::path& file) {
  const Json all = text::parse_json(text::read_settings(file, "figures"), file.string());
  const Json* const runs = all.find("runs");
  const auto whole = [](const Json& run) {
    const Json* const rows = run.find("rows");
    const Json* const when = run.find("when");
    return rows != nullptr && rows->is_array() && when != nullptr && when->is_string();
  };
  if (runs != nullptr && runs->is_array()) {
    bool good = true;
    for (const Json& run : runs->elements()) good = good && whole(run);
    if (good) return *runs;
  }
  throw Error(ErrorCategory::config,
              fmt::format("{}: expected an array \"runs\" of objects with \"when\" and \"rows\"",
                          file.string()));
}

/// The latest runs that fit into the file.
Json newest(const Json& earlier, const Json& run) {
  std::vector<Json> kept = {run};
  std::size_t bytes = run.compact().size();
  const auto& all = earlier.elements();
  for (auto at = all.rbegin(); at != all.rend() && kept.size() < kMaxRuns; ++at) {
    bytes += at->compact().size();
    if (bytes > kMaxBytes) break;
    kept.push_back(*at);
  }
  Json runs = Json::array();
  for (auto at = kept.rbegin(); at != kept.rend(); ++at) runs.push_back(*at);
  return runs;
}

}  // namespace

void BenchPage::add_options(Command command, PageFile& file) {
  command.add_option("--html", &file.path,
                     "Write a page (HTML) with these figures and those of earlier --html runs on "
                     "this machine",
                     {.takes = Names::new_path, .value = "FILE"});
  command.add_flag("--overwrite", &file.overwrite,
                   "Replace the file of --html even if it is not a page of ballast");
}

BenchPage::BenchPage(std::string bench, PageFile file)
    : bench_(std::move(bench)), file_(std::move(file)) {
  if (!file_.path.empty()) text::check_output(file_.path, page_rule(file_.overwrite));
}

void BenchPage::write(const Json& rows, bool announce) const {
  if (file_.path.empty() || rows.elements().empty()) return;
  const std::string host = comm::host_name();
  const auto kept = calibrate::machine_file("bench-" + bench_, host + ", " + cpu_name());
  const Json run = Json::object({{"when", now_in_utc()}, {"version", version()}, {"rows", rows}});
  Json earlier = Json::array();
  try {
    std::optional<Descriptor> lock;
    if (!kept.empty()) lock = calibrate::lock_machine_file(kept);
    const auto found = calibrate::read_kept(
        kept, "bench: cannot use the figures of earlier runs, which are replaced",
        [](const std::filesystem::path& file) { return std::optional(read_runs(file)); });
    if (found) earlier = *found;
    if (lock) {
      text::ReplacedFile replaced(kept);
      replaced.write(Json::object({{"runs", newest(earlier, run)}}).compact() + "\n");
      replaced.commit();
    }
  } catch (const Error& error) {
    log(LogLevel::warning, fmt::format("bench: cannot keep the figures: {}", error.what()));
  }
  Json data = Json::object(
      {{"kind", "bench"},
       {"bench", bench_},
       {"when", *run.find("when")},
       {"rows", rows},
       {"earlier", earlier},
       {"kept", kept.string()},
       {"machine", Json::object({{"host", host}, {"cpu", cpu_name()}, {"cpus", usable_cpus()}})}});
  text::write_output(file_.path, page_rule(file_.overwrite),
                     html_page(fmt::format("ballast bench {}", bench_), data));
  if (announce) fmt::print("page in {}\n", file_.path.string());
}

}  // namespace ballast::tools
