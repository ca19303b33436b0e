#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "ballast/config/config.h"
#include "ballast/train/metrics.h"
#include "ballast/train/run_options.h"

#include "src/formats/event_file.h"
#include "src/formats/new_folder.h"
#include "src/train/waiting_file.h"

namespace ballast::train {

/// The scalars of a step, named after its members in metrics.jsonl. Names of DeepSpeed where it has
/// one (Train/Samples/train_loss, Train/Samples/lr).
std::vector<formats::Scalar> scalars_of(const StepMetrics& metrics);

/// The files of `tensorboard` and `csv_monitor`: scalars of each step over the samples that the run
/// has trained on, as DeepSpeed's monitors write them (deepspeed/monitor). TensorBoard: an event
/// file for each process. CSV: a file for each scalar, Train_Samples_lr.csv, with the columns
/// `step` (samples) and `lr`. A run that goes back or on removes the rows of the steps that follow;
/// in event files a record says that they do not count.
class Monitors {
 public:
  /// Makes the folders, removed at the end if they are empty. Throws Error(io) for one that cannot
  /// be written, Error(usage) if a fresh run would replace CSV files.
  Monitors(const config::Config& config, RunDirectory use);
  ~Monitors();
  Monitors(const Monitors&) = delete;
  Monitors& operator=(const Monitors&) = delete;

  /// The step that follows may have been written before.
  void go_back() { begins_ = true; }
  /// Rows that cannot be written wait (WaitingFile). Files that were deleted are made again. Throws
  /// Error(io) for files of the run's earlier rows that cannot be read or cut.
  void write(const StepMetrics& metrics);
  /// The first of the files whose rows wait; nullptr if none does.
  [[nodiscard]] const WaitingFile* waiting() const;
  /// Those from which rows are missing: WaitingFile::missing().
  [[nodiscard]] std::vector<std::string> missing() const;
  /// Writes what waits, if it can.
  void flush();
  /// The run directory `from` is `to` now.
  void moved(const std::filesystem::path& from, const std::filesystem::path& to);

 private:
  void warn_of_deleted_files() const;
  void write_events(std::int64_t samples, const std::vector<formats::Scalar>& scalars);
  void write_csv(std::int64_t samples, const std::vector<formats::Scalar>& scalars);
  void cut_csv(std::int64_t samples);
  WaitingFile& csv_file(const std::string& name);

  const std::int64_t batch_;  ///< samples of a step
  std::optional<std::filesystem::path> events_folder_;
  std::optional<std::filesystem::path> csv_folder_;
  std::deque<formats::MadeDirectory> made_;
  WaitingFile events_;
  std::map<std::string, WaitingFile, std::less<>> csv_;  ///< by the names of files
  bool begins_ = true;
  bool own_rows_;  ///< those in the CSV files
};

}  // namespace ballast::train
