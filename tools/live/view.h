#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "ballast/train/run_events.h"

#include "tools/console/terminal.h"
#include "tools/live/frame.h"
#include "tools/live/screen.h"

namespace ballast::tools {

/// The live view of a run: a picture of its last step that fills the terminal, redrawn five times a
/// second by its own thread. Lines that the program prints meanwhile are held back and printed when
/// the view ends, by its end or by the key q.
class LiveView final : public LineTaker {
 public:
  LiveView(std::string title, const train::RunStart& start);
  ~LiveView();
  LiveView(const LiveView&) = delete;
  LiveView& operator=(const LiveView&) = delete;

  void stepped(const train::StepReport& report);
  /// Describes the current activity of the run.
  void doing(const std::string& what);
  bool take(const std::string& line, bool warning) override;

 private:
  struct Held {
    std::string line;
    bool warning = false;
  };

  void watch();
  void draw();
  void end();

  Screen screen_;
  std::mutex mutex_;  ///< guards the members below
  LiveState state_;
  memory::Budgets budgets_;
  std::deque<Held> held_;
  std::uint64_t dropped_ = 0;
  bool shown_ = true;
  std::deque<std::chrono::steady_clock::time_point> ends_;  ///< when the last steps ended
  std::chrono::steady_clock::time_point begin_;
  std::uint64_t counted_ = 0;  ///< steps since the first of `ends_`

  std::atomic<bool> stopped_ = false;
  std::thread thread_;
};

}  // namespace ballast::tools
