#include "src/train/run_files.h"

#include <cerrno>
#include <ctime>
#include <map>
#include <system_error>
#include <utility>

#include <fmt/format.h>
#include <unistd.h>

#include "ballast/comm/together.h"
#include "ballast/core/build_info.h"
#include "ballast/core/cpu.h"
#include "ballast/core/error.h"
#include "ballast/planning/plan_json.h"
#include "ballast/planning/saved_plan.h"
#include "ballast/text/files.h"
#include "ballast/text/json.h"

#include "src/train/checkpoint.h"
#include "src/train/checkpoint_swap.h"
#include "src/train/monitors.h"
#include "src/train/saved_weights.h"

namespace ballast::train {
namespace {

namespace fs = std::filesystem;
using text::Json;

constexpr const char* kMetrics = "metrics.jsonl";
constexpr const char* kConfig = "config.json";
constexpr const char* kRun = "run.json";

[[noreturn]] void refuse(const fs::path& used) {
  throw Error(ErrorCategory::usage,
              fmt::format("{} exists: choose another run directory with --out, or give --overwrite "
                          "to replace it",
                          used.string()));
}

void refuse_if_there(const fs::path& file) {
  std::error_code ignored;
  if (fs::exists(file, ignored)) refuse(file);
}

MetricsWriter take(const fs::path& file, RunDirectory use) {
  using enum MetricsWriter::Existing;
  try {
    switch (use) {
      case RunDirectory::fresh:
        break;
      case RunDirectory::overwritten:
        return MetricsWriter(file, replaced);
      case RunDirectory::continued:
        return MetricsWriter(file, continued);
    }
    return MetricsWriter(file, refused);
  } catch (const Error& error) {
    if (error.error_number() == EEXIST) refuse(file);
    throw;
  }
}

/// UTC, as in ISO 8601.
std::string time_text(std::time_t time) {
  std::tm parts = {};
  gmtime_r(&time, &parts);
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}Z", parts.tm_year + 1900, parts.tm_mon + 1,
                     parts.tm_mday, parts.tm_hour, parts.tm_min, parts.tm_sec);
}

Bytes machine_memory() {
  const long pages = sysconf(_SC_PHYS_PAGES);
  const long page = sysconf(_SC_PAGESIZE);
  return pages > 0 && page > 0 ? static_cast<Bytes>(pages) * static_cast<Bytes>(page) : 0;
}

/// Removes what processes have left that were killed while they wrote a file of a run or its
/// weights. Best effort.
void remove_unfinished(const fs::path& directory) {
  std::vector<fs::path> found;
  std::error_code error;
  for (fs::directory_iterator entry(directory, error); !error && entry != fs::directory_iterator();
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    for (const char* finished : {kConfig, kRun, kRunWeights}) {
      const std::string prefix = fmt::format("{}.tmp-", finished);
      if (!name.starts_with(prefix) || name.size() == prefix.size()) continue;
      if (name.find_first_not_of("0123456789", prefix.size()) == std::string::npos) {
        found.push_back(entry->path());
      }
    }
  }
  for (const fs::path& path : found) fs::remove_all(path, error);
}

Json describe_plan(const RunStart& start, const RunChoices& choices) {
  Json plan = planning::plan_json(start.blueprint, choices.prediction);
  plan["flops_per_step"] = start.blueprint.flops_per_step();
  plan["gemm_peak_flops"] = start.gemm_peak_flops;
  plan["chosen"] = planning::chosen_keys(choices.asked, choices.used);
  return plan;
}

}  // namespace

MadeDirectory::MadeDirectory(const fs::path& directory, std::string_view kind,
                             std::string_view another) {
  std::error_code error;
  for (fs::path place = directory; place.has_relative_path() && !fs::exists(place, error);
       place = place.parent_path()) {
    made_.push_back(place);
  }
  fs::create_directories(directory, error);
  if (error) {
    throw Error(ErrorCategory::io,
                fmt::format("cannot create the {} {}; {}", kind, directory.string(), another),
                error.value());
  }
  text::try_to_sync_name(directory);
  for (const fs::path& place : made_) text::try_to_sync_name(place);
}

MadeDirectory::~MadeDirectory() {
  std::error_code error;
  for (const fs::path& place : made_) {
    if (!fs::is_empty(place, error) || error || !fs::remove(place, error)) return;
  }
}

void refuse_used_directory(const fs::path& directory) {
  for (const char* name : {kMetrics, kConfig, kRun, kRunWeights, kCheckpoints}) {
    refuse_if_there(directory / name);
  }
}

RunFiles::RunFiles(const config::Config& config, RunDirectory use)
    : directory_(config.ballast.out),
      use_(use),
      made_(directory_),
      metrics_(take(directory_ / kMetrics, use)) {
  if (!metrics_.lock()) {
    throw Error(ErrorCategory::usage,
                fmt::format("another process trains in {} now; wait for its end, or choose another "
                            "run directory with --out",
                            directory_.string()));
  }
  if (use != RunDirectory::fresh) {
    check_removable(directory_ / kRunWeights);
  } else {
    for (const char* name : {kConfig, kRun, kRunWeights, kCheckpoints}) {
      refuse_if_there(directory_ / name);
    }
  }
  monitors_ = std::make_unique<Monitors>(config, use);
}

RunFiles::~RunFiles() {
  if (metrics_.rows() > 0) return;
  std::error_code ignored;
  for (const fs::path& file : added_) fs::remove(file, ignored);
}

void RunFiles::continue_after(const CheckpointFacts& facts) {
  check_removable(directory_ / kRunWeights);
  remove_unfinished(directory_);
  metrics_.continue_after(facts.metrics_bytes);
  monitors_->go_back();
  continued_step_ = facts.step;
}

void RunFiles::describe(std::string config, std::string run) {
  config_ = std::move(config);
  run_ = std::move(run);
}

void RunFiles::write_new(const char* name, const std::string& text) {
  const fs::path path = directory_ / name;
  std::error_code ignored;
  const bool is_new = !fs::exists(path, ignored);
  text::ReplacedFile file(path);
  file.write(text);
  file.commit();
  if (is_new) added_.push_back(path);
}

void RunFiles::write(const StepMetrics& metrics) {
  if (!std::exchange(described_, true)) {
    remove_model_folder(directory_ / kRunWeights);  // they are of another run, or of fewer steps
    if (use_ == RunDirectory::continued) {
      remove_later(directory_, continued_step_);
    } else {
      remove_unfinished(directory_);
      remove_checkpoints(directory_);
    }
    write_new(kConfig, config_);
    write_new(kRun, run_);
  }
  metrics_.write(metrics);
  monitors_->write(metrics);
}

std::string print_for_another_run(const config::Config& config) {
  config::Config copy = config;
  copy.ballast.out.clear();
  return config::print(copy);
}

std::string describe_run(const RunStart& start, const RunChoices& choices,
                         const std::vector<std::string>& command, std::uint64_t world) {
  Json words = Json::array();
  for (const std::string& word : command) words.push_back(word);
  Json changes = Json::array();
  for (const config::Change& change : choices.changes) changes.push_back(change.text());
  std::error_code ignored;
  const Json run =
      Json::object({{"version", version()},
                    {"command", words},
                    {"changes", changes},
                    {"working_directory", fs::current_path(ignored).string()},
                    {"started", time_text(std::time(nullptr))},
                    {"host", comm::host_name()},
                    {"cpu", cpu_name()},
                    {"cpus", usable_cpus()},
                    {"memory_bytes", machine_memory()},
                    {"ranks", world},
                    {"device", start.device},
                    {"update_instruction_set", start.update_isa},
                    {"io_backend", start.io_backend.empty() ? Json() : Json(start.io_backend)},
                    {"plan", describe_plan(start, choices)}});
  constexpr unsigned kLevels = 2;  // a line for each member of the plan
  return run.pretty(kLevels) + "\n";
}

}  // namespace ballast::train
