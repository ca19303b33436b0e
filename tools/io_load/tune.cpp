#include "tools/io_load/tune.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <memory>

#include <fmt/format.h>
#include <unistd.h>

#include "ballast/aio/queue.h"
#include "ballast/config/config.h"
#include "ballast/core/error.h"
#include "ballast/memory/machine.h"
#include "ballast/plan/simulator.h"
#include "ballast/text/json.h"

#include "tools/command_line.h"
#include "tools/console/terminal.h"
#include "tools/io_load/load.h"
#include "tools/signals.h"

namespace ballast::tools {

namespace {

using text::Json;

constexpr const char* kTuningTask = "tune io";
constexpr std::size_t kLineWidth = 80;
/// Shares of a path's time for the search and for more turns of the settings that decide. The rest
/// is for measuring the chosen setting.
constexpr double kSearchShare = 0.6;
constexpr double kConfirmShare = 0.15;
constexpr double kRatesShare = 1.0 - kSearchShare - kConfirmShare;

/// The usable backends, best first.
std::vector<std::string> usable_backends() {
  std::vector<std::string> names;
  std::string reasons;
  for (const aio::Backend& backend : aio::probe_backends()) {
    if (backend.usable && backend.moves_data) names.push_back(backend.name);
    if (!backend.usable) reasons += fmt::format("; {}: {}", backend.name, backend.reason);
  }
  if (names.empty()) {
    throw Error(ErrorCategory::io, fmt::format("{}: no backend is usable{}", kTuningTask, reasons));
  }
  return names;
}

Bytes checked_size(const TuneIoArguments& a, const std::vector<IoSetting>& settings) {
  Bytes in_flight = 0;
  for (const IoSetting& setting : settings) in_flight = std::max(in_flight, setting.in_flight());
  const Bytes size = read_size(a.size, "tune io: --size");
  if (size < in_flight || size > IoContent::kLargestFile) {
    throw Error(ErrorCategory::usage, fmt::format("{}: --size: must be from {} to {}, got {}",
                                                  kTuningTask, format_bytes(in_flight),
                                                  format_bytes(IoContent::kLargestFile), a.size));
  }
  const Bytes needed = a.paths.size() * (in_flight + IoContent::bytes_needed(size));
  const Bytes available = memory::available_memory();
  if (needed > available) {
    throw Error(ErrorCategory::memory,
                fmt::format("{}: needs {} of memory, but {} is free; tune fewer paths at a time",
                            kTuningTask, format_bytes(needed), format_bytes(available)));
  }
  return size;
}

TunedPath tune_path(const std::filesystem::path& path, IoRegion& region,
                    const std::vector<std::string>& backends, double seconds) {
  TunedPath tuned;
  tuned.path = path;
  tuned.trials =
      search(settings_to_try(backends), region, kSearchShare * seconds, kTuningTask, interrupted());
  confirm(tuned.trials, backends, region, kConfirmShare * seconds, kTuningTask, interrupted());
  tuned.setting = choose(scores_of(tuned.trials), backends);
  tuned.rates =
      measure_rates(tuned.setting, {&region, 1}, kRatesShare * seconds, kTuningTask, interrupted());
  return tuned;
}

void print_path(const TunedPath& tuned) {
  fmt::print("{}\n", describe_path(tuned.path));
  fmt::print("  {:>9} {:>6} {:<9} {:>7} {:>6} {:>9}\n", "block", "depth", "backend", "GB/s",
             "rounds", "in flight");
  std::vector<const IoTrial*> order;
  for (const IoTrial& trial : tuned.trials) {
    if (!trial.rates.empty()) order.push_back(&trial);
  }
  std::stable_sort(order.begin(), order.end(),
                   [](const IoTrial* a, const IoTrial* b) { return a->median() > b->median(); });
  std::size_t left_out = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    const IoTrial& trial = *order[i];
    const bool chosen = trial.setting == tuned.setting;
    if (i >= 8 && !chosen) {
      ++left_out;
      continue;
    }
    fmt::print("  {:>9} {:>6} {:<9} {:>7.3f} {:>6} {:>9}{}\n", format_bytes(trial.setting.block),
               trial.setting.depth, trial.setting.backend, trial.median(), trial.rates.size(),
               format_bytes(trial.setting.in_flight()), chosen ? "  chosen" : "");
  }
  if (left_out > 0) fmt::print("  and {} more settings\n", left_out);
  fmt::print("  chosen: read {:.3f}, write {:.3f}, mixed {:.3f} GB/s\n", tuned.rates.read,
             tuned.rates.write, tuned.rates.mixed);
  std::fflush(stdout);
}

double sum_of_mixed(const IoTuning& tuning) {
  double sum = 0.0;
  for (const TunedPath& tuned : tuning.paths) sum += tuned.rates.mixed;
  return sum;
}

/// Bandwidth of a step: that of all paths together, or of the only one.
double bandwidth(const IoTuning& tuning) {
  return tuning.paths.size() == 1 ? sum_of_mixed(tuning) : tuning.mixed_together;
}

double tokens(double tflops, double gbps) {
  return plan::tokens_to_hide(plan::kNvmeStateBytesPerParameter, 1e12 * tflops, 1e9 * gbps);
}

std::string explain(const IoTuning& tuning, const std::vector<double>& tflops) {
  const double gbps = bandwidth(tuning);
  std::string text;
  for (const TunedPath& tuned : tuning.paths) {
    const auto tried = std::count_if(tuned.trials.begin(), tuned.trials.end(),
                                     [](const IoTrial& trial) { return !trial.rates.empty(); });
    const auto untried = std::ssize(tuned.trials) - tried;
    text += fmt::format(
        "{}: of {} settings tried{}, {} blocks of {} in flight with {} have the least memory in "
        "flight ({}) among those within 3% of the fastest. ",
        tuned.path.string(), tried,
        untried == 0 ? "" : fmt::format(" ({} more did not fit into the time)", untried),
        tuned.setting.depth, format_bytes(tuned.setting.block), tuned.setting.backend,
        format_bytes(tuned.setting.in_flight()));
  }
  if (tuning.paths.size() > 1) {
    text += fmt::format(
        "Paths without their own entry use {} blocks of {} with {}. All paths at once move "
        "{:.2f} GB/s; the sum of the single paths is {:.2f}{}. ",
        tuning.common.depth, format_bytes(tuning.common.block), tuning.common.backend, gbps,
        sum_of_mixed(tuning),
        gbps < 0.8 * sum_of_mixed(tuning)
            ? ": they share a disk or its connection, so striping over them gains little"
            : "");
  }
  text += fmt::format(
      "An optimizer step reads and writes back {:.0f} bytes per parameter kept on NVMe (bf16 "
      "training with AdamW). At {:.2f} GB/s, read and written together, a whole step hides this "
      "(see ballast.speculative_updates; its forward pass alone needs four times as many tokens) "
      "when it has at least",
      plan::kNvmeStateBytesPerParameter, gbps);
  for (std::size_t i = 0; i < tflops.size(); ++i) {
    text += fmt::format("{} {} tokens at {:g} TFLOP/s", i == 0 ? "" : ",",
                        format_count(tokens(tflops[i], gbps)), tflops[i]);
  }
  return text + ", for every model size; with fewer tokens, the disks bound the run.";
}

Json json_of(const IoSetting& setting) {
  return Json::object({{"block_size", setting.block},
                       {"queue_depth", setting.depth},
                       {"backend", setting.backend}});
}

Json json_of(const TunedPath& tuned) {
  Json trials = Json::array();
  for (const IoTrial& trial : tuned.trials) {
    Json row = json_of(trial.setting);
    row["turns"] = trial.rates.size();
    row["mixed_gbps"] = trial.median();
    trials.push_back(std::move(row));
  }
  Json json = json_of(tuned.setting);
  json["path"] = tuned.path.string();
  json["read_gbps"] = tuned.rates.read;
  json["write_gbps"] = tuned.rates.write;
  json["mixed_gbps"] = tuned.rates.mixed;
  json["tried"] = std::move(trials);
  return json;
}

}  // namespace

Json to_json(const IoTuning& tuning, const std::vector<double>& tflops) {
  Json hidden = Json::array();
  for (const double f : tflops) {
    hidden.push_back(
        Json::object({{"tflops", f}, {"tokens_per_step", tokens(f, bandwidth(tuning))}}));
  }
  Json paths = Json::array();
  for (const TunedPath& tuned : tuning.paths) paths.push_back(json_of(tuned));
  Json json = json_of(tuning.common);
  json["mixed_gbps"] = bandwidth(tuning);
  json["hides_nvme_states"] = std::move(hidden);
  json["paths"] = std::move(paths);
  return json;
}

IoTuning tune_io(const TuneIoArguments& a) {
  const auto paths = measured_paths(a.paths, kTuningTask);
  const auto backends = usable_backends();
  const Bytes size = checked_size(a, settings_to_try(backends));
  if (!a.config.empty()) check_writable_config(a.config, paths);
  std::vector<IoRegion> regions;
  regions.reserve(paths.size());
  for (const auto& path : paths) {
    regions.emplace_back(path, static_cast<unsigned>(regions.size()), size,
                         aio::File::Access::direct);
  }
  fill_regions(regions, backends.front(), kTuningTask, interrupted());

  IoTuning tuning;
  std::vector<std::vector<IoTrial>> trials;
  for (std::size_t i = 0; i < paths.size(); ++i) {
    tuning.paths.push_back(tune_path(paths[i], regions[i], backends, a.seconds));
    trials.push_back(tuning.paths.back().trials);
    if (!a.json) print_path(tuning.paths.back());
  }
  tuning.common = tuning.paths.front().setting;
  if (paths.size() > 1) {
    const auto scores = common_scores(trials);
    if (!scores.empty()) tuning.common = choose(scores, backends);
    const double seconds = kRatesShare * a.seconds;
    tuning.mixed_together =
        measure_rates(tuning.common, regions, seconds, kTuningTask, interrupted()).mixed;
  }
  if (!a.json) fmt::print("\n{}\n", wrap(explain(tuning, a.tflops), kLineWidth, ""));
  return tuning;
}

void add_tune(Command program) {
  Command tune = program.add_command("tune", "Find settings that suit this machine");
  tune.require_command();
  auto arguments = std::make_shared<TuneIoArguments>();
  auto& a = *arguments;
  Command command = tune.add_command(
      "io", "Find block size, depth and backend for each swap path and explain the choice");
  command.add_option("--path", &a.paths, "Folder to swap to; several are tuned one by one",
                     {.required = true, .single_argument = true, .takes = Names::folder});
  command.add_option("--seconds", &a.seconds, "Measuring time per path",
                     {.range = std::pair(0.5, 86400.0), .show_default = true});
  command.add_option("--size", &a.size, "Size of the file on each path",
                     {.value = "SIZE", .show_default = true});
  command.add_option("--write", &a.config, "Config file to write the settings into",
                     {.takes = Names::file, .extensions = {".json"}});
  command.add_option("--tflops", &a.tflops,
                     "Compute rates for which to print the tokens per step that hide swapping "
                     "(default: 100,400)",
                     {.commas = true, .single_argument = true, .positive = true});
  command.add_flag("--json", &a.json, "Print a JSON object");
  command.set_action([arguments] {
    const IoTuning tuning = tune_io(*arguments);
    if (arguments->json) {
      fmt::print("{}\n", to_json(tuning, arguments->tflops).pretty(4));
    }
    if (arguments->config.empty()) return;
    write_tuning(arguments->config, tuning);
    if (!arguments->json) fmt::print("\nwritten to {}\n", arguments->config.string());
  });
}

namespace {

/// "256KiB", or a number of bytes if no unit divides it.
Json exact_bytes(Bytes bytes) {
  if (bytes % kMiB == 0) return fmt::format("{}MiB", bytes / kMiB);
  if (bytes % kKiB == 0) return fmt::format("{}KiB", bytes / kKiB);
  return bytes;
}

/// Rounds to three decimals; at least 0.001, since 0 would mean "not measured".
double rounded(double gbps) {
  return std::max(0.001, std::round(gbps * 1e3) / 1e3);
}

config::AioPath entry_of(const TunedPath& tuned) {
  return {.path = tuned.path,
          .block_size = tuned.setting.block,
          .queue_depth = tuned.setting.depth,
          .backend = config::value_named<config::IoBackend>(tuned.setting.backend).value(),
          .read_gbps = rounded(tuned.rates.read),
          .write_gbps = rounded(tuned.rates.write)};
}

Json json_of(const config::AioPath& entry) {
  return Json::object({{"path", entry.path.string()},
                       {"block_size", exact_bytes(entry.block_size)},
                       {"queue_depth", entry.queue_depth},
                       {"backend", config::name_of(entry.backend)},
                       {"read_gbps", entry.read_gbps},
                       {"write_gbps", entry.write_gbps}});
}

bool may_swap(const config::OffloadSection& section) {
  return !section.tier || *section.tier == Tier::nvme;
}

std::vector<config::Edit> edits_for(const config::Config& config, const IoTuning& tuning) {
  Json entries = Json::array();
  Json folders = Json::array();
  for (const TunedPath& tuned : tuning.paths) {
    entries.push_back(json_of(entry_of(tuned)));
    folders.push_back(tuned.path.string());
  }
  std::vector<config::Edit> edits = {
      {"aio.backend", Json(tuning.common.backend).compact()},
      {"aio.block_size", exact_bytes(tuning.common.block).compact()},
      {"aio.queue_depth", Json(tuning.common.depth).compact()},
      {"aio.paths", entries.pretty(1)},
  };
  const std::string nvme_path =
      (tuning.paths.size() > 1 ? folders : folders.elements().front()).pretty(0);
  if (may_swap(config.zero.optimizer)) {
    edits.push_back({"zero_optimization.offload_optimizer.nvme_path", nvme_path});
  }
  if (may_swap(config.zero.parameters)) {
    edits.push_back({"zero_optimization.offload_param.nvme_path", nvme_path});
  }
  return edits;
}

/// Throws unless `config` has the tuned settings.
void require_tuned(const config::Config& config, const IoTuning& tuning,
                   const std::filesystem::path& file) {
  std::vector<config::AioPath> entries;
  std::vector<std::filesystem::path> folders;
  for (const TunedPath& tuned : tuning.paths) {
    entries.push_back(entry_of(tuned));
    folders.push_back(tuned.path);
  }
  const auto require = [&](bool condition, std::string_view key) {
    if (condition) return;
    throw Error(ErrorCategory::state,
                fmt::format("{}: {} would not get the tuned value; the file was not changed",
                            file.string(), key));
  };
  const config::AioSection& aio = config.aio;
  require(config::name_of(aio.backend) == tuning.common.backend, "aio.backend");
  require(aio.block_size == tuning.common.block, "aio.block_size");
  require(aio.queue_depth == tuning.common.depth, "aio.queue_depth");
  require(aio.paths == entries, "aio.paths");
  for (const auto* section : {&config.zero.optimizer, &config.zero.parameters}) {
    require(!may_swap(*section) || section->nvme_path == folders, "nvme_path");
  }
}

void note_limits(const config::Config& config, const IoTuning& tuning,
                 const std::filesystem::path& file) {
  for (const TunedPath& tuned : tuning.paths) {
    if (tuned.setting.in_flight() <= config.aio.in_flight_bytes) continue;
    log(LogLevel::warning,
        fmt::format("{}: aio.in_flight_bytes is {}, less than the setting of {} needs: {} blocks "
                    "of {}; raise it",
                    file.string(), format_bytes(config.aio.in_flight_bytes), tuned.path.string(),
                    tuned.setting.depth, format_bytes(tuned.setting.block)));
  }
}

}  // namespace

void check_writable_config(const std::filesystem::path& config,
                           const std::vector<std::filesystem::path>& paths) {
  const config::Config before = config::load(config, {});
  const std::filesystem::path target = std::filesystem::canonical(config);
  for (const auto& place : {target, target.parent_path()}) {
    if (access(place.c_str(), W_OK) == 0) continue;
    throw Error(ErrorCategory::io,
                fmt::format("--write {}: {} is not writable", config.string(), place.string()),
                errno);
  }
  IoTuning sample = {.common = {.block = kMiB, .depth = 32, .backend = "threads"}};
  for (const auto& path : paths) {
    sample.paths.push_back(
        {.path = path, .setting = sample.common, .rates = {.read = 1.0, .write = 1.0}});
  }
  config::try_edit(config, edits_for(before, sample),
                   [&](const config::Config& after) { require_tuned(after, sample, config); });
}

void write_tuning(const std::filesystem::path& file, const IoTuning& tuning) {
  const config::Config before = config::load(file, {});
  config::edit_file(file, edits_for(before, tuning),
                    [&](const config::Config& after) { require_tuned(after, tuning, file); });
  note_limits(before, tuning, file);
}

}  // namespace ballast::tools
