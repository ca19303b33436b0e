#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "ballast/core/memory.h"
#include "ballast/train/run_events.h"

#include "tools/console/terminal.h"

namespace ballast::tools {

/// The losses of a run, condensed into at most 1024 means over equal numbers of steps.
class LossHistory {
 public:
  /// Ignores a loss that is not finite.
  void add(double loss);
  /// At most `most` means, the oldest first. Empty if no loss is finite.
  [[nodiscard]] std::vector<double> means(std::size_t most) const;

 private:
  struct Group {
    double sum = 0.0;
    std::uint64_t count = 0;
  };

  std::vector<Group> groups_;
  std::uint64_t steps_ = 1;  ///< steps per group
};

/// A bar. `share` (0 to 1) of its length is filled; without a share there is no bar.
struct Gauge {
  std::string name;
  std::optional<double> share;
  std::string text;  ///< the numbers next to it
};

/// Estimates of the time to the end of a run.
struct TimeLeft {
  double low = 0.0;  ///< seconds
  double high = 0.0;
  std::uint64_t steps = 0;  ///< number of last steps whose pace gives one of the two estimates
};

/// The content of the live view.
struct LiveState {
  std::string title;
  std::string doing;  ///< "step 5 running"
  std::uint64_t step = 0;
  std::uint64_t steps = 0;
  double elapsed = 0.0;  ///< seconds
  std::optional<double> loss;
  std::string numbers;  ///< "lr 1.00e-03, norm 0.32, ..."
  std::string speed;    ///< "12.3k tok/s, ..."
  std::optional<TimeLeft> left;
  LossHistory losses;
  std::vector<Gauge> tiers;
  std::vector<Gauge> lanes;
  std::deque<std::string> warnings;  ///< the latest last
};

struct FrameOptions {
  std::size_t columns = 80;
  std::size_t rows = 24;
  bool colour = true;   ///< if false, the lines contain no escape sequences
  bool unicode = true;  ///< if false, ASCII
};

/// Returns at most `rows` lines of at most `columns` columns. If there is little room, the most
/// important lines remain.
std::vector<std::string> frame_lines(const LiveState& state, const FrameOptions& options);

/// The whole terminal of standard input and output, between enter() and leave(): the alternate
/// screen without cursor and line breaks, and keys without echo (termios(3), console_codes(4)). A
/// signal that ends the program restores the terminal first. One at a time; not thread-safe.
class Screen {
 public:
  /// Whether both are a terminal that can move its cursor.
  static bool available();

  Screen();
  ~Screen();
  Screen(const Screen&) = delete;
  Screen& operator=(const Screen&) = delete;

  /// Takes over the terminal, unless the program is in the background.
  void enter();
  void leave();
  [[nodiscard]] bool entered() const { return entered_; }
  /// Size of the terminal; colour unless NO_COLOR is set (no-color.org), Unicode if the locale's
  /// encoding is UTF-8.
  [[nodiscard]] FrameOptions options() const;
  /// Replaces the screen's content with one write(2). Lines are as wide as the terminal.
  void draw(const std::vector<std::string>& lines, std::size_t rows) const;

  enum class Event { none, quit, stop, resumed };
  /// Waits for the key q (`quit`), Ctrl-Z or SIGTSTP (`stop`), SIGCONT (`resumed`), wake() or the
  /// timeout.
  Event wait(int milliseconds);
  /// Ends wait() on another thread.
  void wake() const;
  /// Stops the program as SIGTSTP does. Returns when it is continued.
  void stop();

 private:
  Descriptor event_;  ///< eventfd(2)
  bool unicode_ = false;
  bool entered_ = false;
};

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
