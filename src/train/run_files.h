#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ballast/checkpoint/checkpoints.h"
#include "ballast/config/config.h"
#include "ballast/config/resumption.h"
#include "ballast/plan/simulator.h"
#include "ballast/train/metrics.h"
#include "ballast/train/run_events.h"
#include "ballast/train/run_options.h"

#include "src/formats/new_folder.h"
#include "src/train/run_place.h"
#include "src/train/waiting_file.h"

namespace ballast::train {

class Monitors;

/// The files of a run in its directory: metrics.jsonl, and config.json and run.json, which say how
/// the run was made, and those of its monitors. A run that fails before its first row leaves none
/// of them.
class RunFiles {
 public:
  /// Takes the run directory of `config` for this run; no other run can take it as long as this
  /// process lives. Throws Error(usage) if another one has it; a new run throws like
  /// refuse_used_directory() and Monitors. Throws Error(io).
  RunFiles(const config::Config& config, RunDirectory use);
  ~RunFiles();
  RunFiles(const RunFiles&) = delete;
  RunFiles& operator=(const RunFiles&) = delete;

  /// Whether `file` is one of those that a run writes in its directory, or in a folder of it.
  [[nodiscard]] bool owns(const std::filesystem::path& file) const;
  /// Decides what RunDirectory::automatic means here and returns that: see
  /// train::begin_or_continue. Call it once, before all that follow, unless the run is finished.
  /// Throws like the constructor.
  RunDirectory begin_or_continue(const config::Config& config);
  /// The run goes on after this checkpoint of its own, with its part of metrics.jsonl. Later
  /// checkpoints are removed with the first row. Throws Error(io).
  void continue_after(const checkpoint::CheckpointFacts& facts);
  /// MetricsWriter::sync().
  Bytes sync() { return metrics_.sync(); }
  /// Content of config.json and run.json.
  void describe(std::string config, std::string run);
  /// Appends a row to metrics.jsonl and to the files of the monitors. The first one writes the
  /// other files before, and throws Error(io) if it cannot be written. Later ones wait until they
  /// can be written, with a warning. Returns what has become of the run directory since the row
  /// before. A directory with another name is followed; one that was deleted is made again with
  /// config.json, run.json and the rows from now on. Throws Error(io) if it was deleted and another
  /// one has its name.
  RunPlace::Fate write(const StepMetrics& metrics);
  /// The run directory, by its newest name.
  [[nodiscard]] const std::filesystem::path& directory() const { return directory_; }

 private:
  void open_others(const config::Config& config);
  RunPlace::Fate look_after(std::uint64_t step);
  void follow(const std::filesystem::path& now, std::uint64_t step);
  RunPlace::Fate restore(std::uint64_t step);
  [[nodiscard]] const WaitingFile* waiting();
  void tell_what_waits(std::uint64_t step);
  void report_missing();
  void write_new(const char* name, const std::string& text);

  std::filesystem::path directory_;
  RunDirectory use_;
  formats::MadeDirectory made_;
  MetricsWriter metrics_;
  std::unique_ptr<Monitors> monitors_;  ///< after metrics_, whose file has been locked
  std::optional<RunPlace> place_;
  bool is_gone_ = false;  ///< and could not be made again yet
  bool rows_wait_ = false;
  bool rows_were_dropped_ = false;
  std::uint64_t outages_ = 0;  ///< times that rows began to wait
  std::string config_;
  std::string run_;
  bool described_ = false;
  std::uint64_t continued_step_ = 0;          ///< of the checkpoint from which the run goes on
  std::vector<std::filesystem::path> added_;  ///< written by this run where there was no file
};

/// config.json: `config` without its run directory, so that running it makes a new one.
std::string print_for_another_run(const config::Config& config);

/// What the planner has made of a run's config.
struct RunChoices {
  const config::Config& asked;
  const config::Config& used;
  const plan::Prediction* prediction = nullptr;  ///< nullptr without rates of this machine
  /// Settings that differ from those of the checkpoint from which the run resumes.
  const std::vector<config::Change>& changes;
};

/// run.json: program, command, time, machine and device of a run of `world` ranks that has started,
/// and its plan: that of plan_json(), the keys that the planner has `chosen`, and what makes the
/// roofline.
std::string describe_run(const RunStart& start, const RunChoices& choices,
                         const std::vector<std::string>& command, std::uint64_t world);

}  // namespace ballast::train
