#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ballast/train/run_events.h"

#include "tools/console/terminal.h"
#include "tools/live/view.h"

namespace ballast::tools {

/// Prints a run to standard output in at most 80 columns, or the columns of a narrower terminal: a
/// line every `steps_per_print` steps (none with config::kNoProgressLines) and, on a terminal, a
/// live line below them or the live view instead of both.
class Console final : public train::Observer {
 public:
  /// `live`: show the live view; only if Screen::available(). `ending`: lines after the summary.
  /// `resuming`: the command that resumes the run.
  Console(std::string title, std::uint64_t steps_per_print, bool launched, bool live,
          std::vector<std::string> ending, std::string resuming);

  void planned(const engine::Blueprint& blueprint, const std::string& device) override;
  void started(const train::RunStart& start) override;
  void stepped(const train::StepReport& report) override;
  void reading(Bytes done, Bytes total) override;
  void saving(Bytes done, Bytes total) override;
  void finished(const train::RunSummary& summary) override;
  void already_finished(const train::FinishedRun& run) override;
  /// Sets the notice of a signal once the run is planned (announce_ending()); nullptr: none.
  void ends_in_steps(const char* ending) { ending_in_steps_ = ending; }
  /// Whether finished() has printed the summary.
  [[nodiscard]] bool summarized() const { return summarized_; }

 private:
  /// Standard output cannot be written. A closed pipe ends the run as a signal does. Otherwise the
  /// run continues: nobody needs its lines after a terminal was closed, or a disk is full.
  void lose_output(int error_number);
  void show_step(const train::StepReport& report);
  void show_memory(const train::RunSummary& summary);
  void show_losses(const train::RunSummary& summary);
  void show_wear(const train::RunSummary& summary);

  std::string title_;
  std::uint64_t steps_per_print_;
  bool launched_;
  std::vector<std::string> ending_;
  std::string resuming_;
  bool live_;
  Terminal terminal_;
  std::unique_ptr<LiveView> view_;
  std::string header_;  ///< last header shown
  const char* ending_in_steps_ = nullptr;
  bool summarized_ = false;
  bool lost_output_ = false;
};

}  // namespace ballast::tools
