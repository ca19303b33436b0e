#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "ballast/config/config.h"
#include "ballast/formats/file_formats.h"
#include "ballast/train/metrics.h"
#include "ballast/train/run_options.h"

#include "src/formats/new_folder.h"
#include "src/train/waiting_file.h"

namespace ballast::train {

/// Returns the scalars of a step. They have DeepSpeed's names where it has one
/// (Train/Samples/train_loss, Train/Samples/lr), otherwise those of the members in metrics.jsonl.
std::vector<formats::Scalar> scalars_of(const StepMetrics& metrics);

/// The files of `tensorboard` and `csv_monitor`: scalars of each step over the number of trained
/// samples, as DeepSpeed's monitors write them (deepspeed/monitor). TensorBoard: an event file per
/// process. CSV: a file per scalar, such as Train_Samples_lr.csv, with the columns `step` (samples)
/// and `lr`. A run that resumes or goes back removes the rows of later steps; in event files a
/// record marks them as discarded.
class Monitors {
 public:
  /// Creates the folders, which are removed at the end if they are empty. Throws Error(io) for a
  /// folder that cannot be written, Error(usage) if a fresh run would replace CSV files.
  Monitors(const config::Config& config, RunDirectory use);
  ~Monitors();
  Monitors(const Monitors&) = delete;
  Monitors& operator=(const Monitors&) = delete;

  /// Call it before a step that may have been written before.
  void go_back() { begins_ = true; }
  /// Writes the rows of a step. Rows that cannot be written wait (WaitingFile). Deleted files are
  /// created again. Throws Error(io) for files with earlier rows of the run that cannot be read or
  /// cut.
  void write(const StepMetrics& metrics);
  /// Returns the first file with waiting rows; nullptr if there is none.
  [[nodiscard]] const WaitingFile* waiting() const;
  /// Returns WaitingFile::missing() of the files from which rows are missing.
  [[nodiscard]] std::vector<std::string> missing() const;
  /// Writes waiting rows, if possible.
  void flush();
  /// Call it when the run directory was renamed.
  void moved(const std::filesystem::path& from, const std::filesystem::path& to);

 private:
  void warn_of_deleted_files() const;
  void write_events(std::int64_t samples, const std::vector<formats::Scalar>& scalars);
  /// A step without a loss has a row with an empty cell.
  void write_csv(std::int64_t samples, const std::vector<formats::Scalar>& scalars, bool has_loss);
  void cut_csv(std::int64_t samples);
  WaitingFile& csv_file(const std::string& name);

  const std::int64_t batch_;  ///< samples per step
  std::optional<std::filesystem::path> events_folder_;
  std::filesystem::path run_;  ///< the run directory, if the CSV files are elsewhere
  std::optional<std::filesystem::path> csv_folder_;
  std::deque<formats::MadeDirectory> made_;
  WaitingFile events_;
  std::map<std::string, WaitingFile, std::less<>> csv_;  ///< by file name
  bool begins_ = true;
  bool own_rows_;  ///< whether the rows in the CSV files are this run's
};

}  // namespace ballast::train
