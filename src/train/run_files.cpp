#include "src/train/run_files.h"

#include <bit>
#include <cerrno>
#include <ctime>
#include <exception>
#include <map>
#include <system_error>
#include <utility>

#include <fmt/format.h>
#include <unistd.h>

#include "ballast/comm/agreement.h"
#include "ballast/core/error.h"
#include "ballast/core/machine.h"
#include "ballast/formats/export.h"
#include "ballast/setup/run_plan.h"
#include "ballast/setup/setup.h"
#include "ballast/text/files.h"
#include "ballast/text/json.h"

#include "src/checkpoint/checkpoint.h"
#include "src/checkpoint/kept_checkpoints.h"
#include "src/train/monitors.h"
#include "src/train/run_directory.h"

namespace ballast::train {
namespace {

namespace fs = std::filesystem;
using text::Json;

/// Checks the directory before any file in it is opened.
RunDirectory checked(const fs::path& directory, RunDirectory use) {
  if (use == RunDirectory::overwritten) refuse_foreign_files(directory);
  return use;
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
      case RunDirectory::automatic:
        return MetricsWriter(file, continued);
    }
    return MetricsWriter(file, refused);
  } catch (const Error& error) {
    if (error.error_number() == EEXIST) refuse_used(file);
    throw;
  }
}

/// UTC in ISO 8601.
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

/// Removes files that killed processes left unfinished: files of a run, or weights. Best effort.
void remove_unfinished(const fs::path& directory) {
  std::error_code error;
  for (const char* finished : {kConfig, kRun, formats::kRunWeights}) {
    for (const fs::path& left : text::unfinished_of(directory / finished)) {
      fs::remove_all(left, error);
    }
  }
}

Json describe_plan(const RunStart& start, const RunChoices& choices) {
  Json plan = setup::plan_json(start.blueprint, choices.prediction);
  plan["flops_per_step"] = start.blueprint.flops_per_step();
  plan["gemm_peak_flops"] = start.gemm_peak_flops;
  plan["chosen"] = setup::chosen_keys(choices.asked, choices.used);
  return plan;
}

}  // namespace

RunFiles::RunFiles(const config::Config& config, RunDirectory use)
    : directory_(config.ballast.out),
      use_(checked(directory_, use)),
      made_(directory_),
      metrics_(take(directory_ / kMetrics, use)) {
  if (!metrics_.lock()) {
    std::error_code ignored;
    const bool linked = fs::hard_link_count(directory_ / kMetrics, ignored) > 1 && !ignored;
    throw Error(ErrorCategory::usage,
                fmt::format("another process trains in {}{} now; wait for its end, or choose "
                            "another run directory with --out",
                            directory_.string(),
                            linked ? ", or in a directory with the same metrics.jsonl," : ""));
  }
  if (use != RunDirectory::automatic) open_others(config);
}

RunDirectory RunFiles::begin_or_continue(const config::Config& config) {
  use_ = train::begin_or_continue(directory_, metrics_.is_new());
  open_others(config);
  return use_;
}

void RunFiles::open_others(const config::Config& config) {
  if (use_ == RunDirectory::fresh) {
    refuse_used_directory(directory_, kMetrics);
  } else {
    formats::check_removable(directory_ / formats::kRunWeights);
  }
  monitors_ = std::make_unique<Monitors>(config, use_);
  place_.emplace(directory_);
}

RunFiles::~RunFiles() {
  if (metrics_.rows() > 0) {
    report_missing();
    return;
  }
  std::error_code ignored;
  for (const fs::path& file : added_) fs::remove(file, ignored);
}

bool RunFiles::owns(const fs::path& file) const {
  std::error_code error;
  if (file.empty()) return false;
  const fs::path inside = fs::weakly_canonical(fs::absolute(file, error), error)
                              .lexically_relative(fs::weakly_canonical(directory_, error));
  return !inside.empty() && is_of_run_directory(*inside.begin());
}

void RunFiles::continue_after(const checkpoint::CheckpointFacts& facts) {
  formats::check_removable(directory_ / formats::kRunWeights);
  remove_unfinished(directory_);
  metrics_.continue_after(facts.step);
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

RunPlace::Fate RunFiles::write(const StepMetrics& metrics) {
  const bool is_first = !std::exchange(described_, true);
  RunPlace::Fate fate = RunPlace::Fate::there;
  if (is_first) {
    formats::remove_model_folder(
        directory_ / formats::kRunWeights);  // they are from another run, or from fewer steps
    if (use_ == RunDirectory::continued) {
      checkpoint::remove_later(directory_, continued_step_);
    } else {
      remove_unfinished(directory_);
      checkpoint::remove_checkpoints(directory_);
    }
    write_new(kConfig, config_);
    write_new(kRun, run_);
  } else {
    fate = look_after(metrics.step);
  }
  metrics_.write(metrics);
  if (is_first && metrics_.file().failure()) throw Error(*metrics_.file().failure());
  monitors_->write(metrics);
  if (is_first && waiting() != nullptr) throw Error(*waiting()->failure());
  tell_what_waits(metrics.step);
  return fate;
}

RunPlace::Fate RunFiles::look_after(std::uint64_t step) {
  using Fate = RunPlace::Fate;
  const RunPlace::Whereabouts found = place_->look();
  switch (found.fate) {
    case Fate::there:
      if (metrics_.file().is_deleted()) return restore(step);
      is_gone_ = false;
      return Fate::there;
    case Fate::moved:
      follow(found.now, step);
      return Fate::moved;
    case Fate::deleted:
      return restore(step);
    case Fate::replaced:
      break;
  }
  throw Error(ErrorCategory::io,
              fmt::format("step {}: the run directory {} was deleted, and another one has its name "
                          "now; the run ends, since it has no place for its files",
                          step, directory_.string()));
}

void RunFiles::follow(const fs::path& now, std::uint64_t step) {
  log(LogLevel::warning,
      fmt::format("step {}: the run directory {} is {} now; training continues there", step,
                  directory_.string(), now.string()));
  monitors_->moved(directory_, now);
  directory_ = now;
  metrics_.file().moved_to(directory_ / kMetrics);
  place_.emplace(directory_);
}

/// Errors are treated like a full disk: the rows wait, and the next attempt restores the files.
RunPlace::Fate RunFiles::restore(std::uint64_t step) {
  const bool known = std::exchange(is_gone_, true);
  if (!known) {
    log(LogLevel::warning,
        fmt::format("step {}: the files of the run in {} were deleted; they are created again with "
                    "the rows from this step on, and training continues",
                    step, directory_.string()));
  }
  std::error_code error;
  fs::create_directories(directory_, error);
  try {
    if (!fs::exists(directory_ / kConfig, error)) write_new(kConfig, config_);
    if (!fs::exists(directory_ / kRun, error)) write_new(kRun, run_);
    place_.emplace(directory_);
  } catch (const Error& failure) {
    if (!known) log(LogLevel::warning, failure.what());
  }
  return known ? RunPlace::Fate::there : RunPlace::Fate::deleted;
}

const WaitingFile* RunFiles::waiting() {
  return metrics_.file().failure() ? &metrics_.file() : monitors_->waiting();
}

/// A disk may become full and free many times, so this warns at the 1st, 2nd, 4th, 8th, ... outage.
void RunFiles::tell_what_waits(std::uint64_t step) {
  const WaitingFile* const file = waiting();
  const bool waits = file != nullptr;
  if (waits && file->dropped() > 0 && !std::exchange(rows_were_dropped_, true)) {
    log(LogLevel::warning, fmt::format("step {}: too many rows of {} wait; the oldest are dropped",
                                       step, file->path().string()));
  }
  if (std::exchange(rows_wait_, waits) == waits) return;
  if (waits) ++outages_;
  if (!std::has_single_bit(outages_)) return;
  if (waits) {
    log(LogLevel::warning, fmt::format("step {}: {}; rows wait in memory until they can be "
                                       "written, and training continues",
                                       step, file->failure()->what()));
  } else {
    log(LogLevel::info,
        fmt::format("step {}: rows can be written again, and all that waited are", step));
  }
}

/// Reports missing rows at the end of the run.
void RunFiles::report_missing() {
  try {
    metrics_.file().flush();
    monitors_->flush();
    std::vector<std::string> lines = monitors_->missing();
    lines.insert(lines.begin(), metrics_.file().missing());
    for (const std::string& line : lines) {
      if (!line.empty()) log(LogLevel::warning, line);
    }
  } catch (const std::exception& error) {
    log(LogLevel::warning, error.what());
  }
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
  for (const config::SettingChange& change : choices.changes) changes.push_back(change.text());
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
  constexpr unsigned kLevels = 2;  // one line per member of the plan
  return run.pretty(kLevels) + "\n";
}

}  // namespace ballast::train
