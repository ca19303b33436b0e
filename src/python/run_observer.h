#pragma once

#include <optional>
#include <string>

#include <nanobind/nanobind.h>

#include "ballast/train/run_events.h"

namespace ballast::python {

/// Passes each step of a run to a Python function and keeps the summary. The run's thread must not
/// hold the GIL; everything else needs it.
class RunObserver final : public train::Observer {
 public:
  /// `callback`: takes a dict with the members of a line of metrics.jsonl; None: no callback.
  /// `progress`: takes finished and planned steps, the loss or None, and tokens per second, before
  /// the first step and after each one. It does not raise; None: no progress.
  RunObserver(nanobind::object callback, nanobind::object progress)
      : callback_(std::move(callback)), progress_(std::move(progress)) {}

  void planned(const engine::Blueprint& blueprint, const std::string& device) override;
  void started(const train::RunStart& start) override;
  void stepped(const train::StepReport& report) override;
  void finished(const train::RunSummary& summary) override;
  void already_finished(const train::FinishedRun& run) override;

  void set_directory(std::string directory) { directory_ = std::move(directory); }
  /// Whether the callback has ended the run.
  [[nodiscard]] bool stopped() const { return stopped_; }
  [[nodiscard]] bool summarized() const { return summary_.has_value(); }
  /// Throws the exception that the callback has raised, if any.
  void throw_error_of_callback();
  [[nodiscard]] nanobind::dict result() const;

 private:
  struct Summary {
    std::uint64_t steps = 0;
    std::uint64_t planned_steps = 0;
    bool interrupted = false;
    std::optional<double> last_loss;
    std::optional<double> held_out_loss;
    double tokens_per_second = 0.0;
    std::string weights;
    std::string checkpoint;
    std::string advice;
  };

  void call(const std::string& line);

  nanobind::object callback_;
  nanobind::object progress_;
  std::string directory_;
  bool stopped_ = false;
  std::optional<nanobind::python_error> error_;
  std::optional<Summary> summary_;
};

}  // namespace ballast::python
