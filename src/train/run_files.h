#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ballast/checkpoint/checkpoints.h"
#include "ballast/config/config.h"
#include "ballast/config/key_effects.h"
#include "ballast/plan/simulator.h"
#include "ballast/train/metrics.h"
#include "ballast/train/run_events.h"
#include "ballast/train/run_options.h"

#include "src/formats/new_folder.h"
#include "src/train/run_directory.h"
#include "src/train/waiting_file.h"

namespace ballast::train {

class Monitors;

/// The files of a run in its directory: metrics.jsonl, config.json and run.json, which describe how
/// the run was made, and the files of its monitors. A run that fails before its first row leaves
/// none of them.
class RunFiles {
 public:
  /// Takes the run directory of `config`. No other run can take it during the lifetime of this
  /// process. Throws Error(usage) if another run has it; a new run throws like
  /// refuse_used_directory() and Monitors. Throws Error(io).
  RunFiles(const config::Config& config, RunDirectory use);
  ~RunFiles();
  RunFiles(const RunFiles&) = delete;
  RunFiles& operator=(const RunFiles&) = delete;

  /// Returns whether `file` is one that a run writes, in its directory or in a folder of it.
  [[nodiscard]] bool owns(const std::filesystem::path& file) const;
  /// Decides what RunDirectory::automatic means here and returns it: see train::begin_or_continue.
  /// Call it once, before the functions below, unless the run is finished. Throws like the
  /// constructor.
  RunDirectory begin_or_continue(const config::Config& config);
  /// Continues after a checkpoint of this run, with its part of metrics.jsonl. The first row
  /// removes later checkpoints. Throws Error(io).
  void continue_after(const checkpoint::CheckpointFacts& facts);
  /// See MetricsWriter::sync().
  Bytes sync() { return metrics_.sync(); }
  /// Sets the content of config.json and run.json.
  void describe(std::string config, std::string run);
  /// Appends a row to metrics.jsonl and to the files of the monitors. The first row also writes the
  /// other files, and throws Error(io) if they cannot be written. Later rows wait until they can be
  /// written, with a warning. Returns what happened to the run directory since the last row. A
  /// renamed directory is followed. A deleted one is created again, with config.json, run.json and
  /// the rows from now on. Throws Error(io) if it was deleted and another directory has its name.
  RunPlace::Fate write(const StepMetrics& metrics);
  /// The run directory under its current name.
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
  std::unique_ptr<Monitors> monitors_;  ///< after metrics_, whose file is locked
  std::optional<RunPlace> place_;
  bool is_gone_ = false;  ///< deleted, and could not be created again yet
  bool rows_wait_ = false;
  bool rows_were_dropped_ = false;
  std::uint64_t outages_ = 0;  ///< times that rows began to wait
  std::string config_;
  std::string run_;
  bool described_ = false;
  std::uint64_t continued_step_ = 0;  ///< step of the checkpoint that the run continues from
  std::vector<std::filesystem::path> added_;  ///< files that did not exist before this run
};

/// Returns config.json: `config` without its run directory, so that running it makes a new one.
std::string print_for_another_run(const config::Config& config);

/// The planner's choices for a run.
struct RunChoices {
  const config::Config& asked;
  const config::Config& used;
  const plan::Prediction* prediction = nullptr;  ///< nullptr without rates of this machine
  /// Settings that differ from those of the checkpoint that the run resumes.
  const std::vector<config::SettingChange>& changes;
};

/// Returns run.json: program, command, time, machine and device of a run of `world` ranks that has
/// started, and its plan: plan_json(), the keys that the planner has `chosen`, and the data of the
/// roofline.
std::string describe_run(const RunStart& start, const RunChoices& choices,
                         const std::vector<std::string>& command, std::uint64_t world);

}  // namespace ballast::train
