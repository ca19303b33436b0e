#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <utility>

namespace ballast::tools {

/// Writes `text` to a standard stream: STDOUT_FILENO, after what stdio has buffered for it, or
/// STDERR_FILENO. Never throws, since a message must not end the work that it is about. Returns 0,
/// or the error number of the system: EPIPE for a pipe whose reader has ended, EIO for a terminal
/// that was closed. After a signal (interrupted()), a stream that takes nothing for a second is
/// given up, and this and all later calls return ETIMEDOUT.
int write_output(int stream, std::string_view text);

/// Writes the line "ballast: error: MESSAGE" to standard error, if possible.
void print_error(std::string_view message);

/// Receives lines instead of the terminal.
class LineTaker {
 public:
  virtual ~LineTaker() = default;
  /// Takes a line of standard output, or a `warning` or other line of the log. If it returns false,
  /// the line is printed. May be called on any thread; must not print.
  virtual bool take(const std::string& line, bool warning) = 0;
};

/// Sets the taker; nullptr: none. Returns when no other thread uses the former one.
void set_line_taker(LineTaker* taker);
/// Passes the line to the taker. Returns whether it was taken.
bool take_line(const std::string& line, bool warning);

/// Standard output of a run: lines that stay and, on a terminal, one live line below them.
class Terminal {
 public:
  /// Receives the error number of the system if standard output cannot be written.
  using OnFailure = std::function<void(int error_number)>;

  /// Without `interactive` there is no live line, and lines are not broken. `on_failure`: for work
  /// that continues without its output; without it, std::system_error is thrown.
  explicit Terminal(bool interactive, OnFailure on_failure = {})
      : interactive_(interactive), on_failure_(std::move(on_failure)) {}
  ~Terminal();
  /// Whether standard output is a terminal that can move back in a line: not TERM=dumb.
  static bool available();
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  /// Columns per line: 80, or those of a narrower terminal.
  [[nodiscard]] std::size_t width() const;
  /// Prints one or several lines that stay. A single line that is too wide for the terminal is
  /// broken at its spaces.
  void show(const std::string& line) const;
  /// Replaces the live line. Text that is too wide is cut off.
  void live(const std::string& line) const;

 private:
  void print(std::string_view text) const;

  bool interactive_;
  OnFailure on_failure_;
};

/// Whether a view fills the terminal and takes all lines. Safe in a signal handler.
bool view_fills_terminal();
/// Moves the cursor back over the live line and erases it.
inline constexpr std::string_view kEraseLine = "\r\x1b[K";
/// Whether there was a live line. It then no longer counts as shown. Safe in a signal handler.
bool forget_live_line();
/// Erases the live line, if there is one, before other output to the terminal.
void erase_live_line();

/// Breaks `text` into lines of at most `width` columns, each starting with `indent`.
std::string wrap(const std::string& text, std::size_t width, const std::string& indent);

/// Makes the first SIGINT, SIGTERM or SIGHUP print at once, on standard error, how the work ends:
/// "ballast: SIGTERM: the run ends after this step; a second signal after 2 seconds ends it at
/// once". `ending` must live as long as the program; nullptr prints nothing. A view that fills the
/// terminal (set_line_taker()) shows this itself.
void announce_ending(const char* ending);

}  // namespace ballast::tools
