#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace ballast::tools {

/// Receives lines instead of the terminal.
class LineTaker {
 public:
  virtual ~LineTaker() = default;
  /// A line of standard output, or a `warning` or other line of the log. False: print it. Any
  /// thread; must not print.
  virtual bool take(const std::string& line, bool warning) = 0;
};

/// nullptr: none. Returns when no other thread uses the former one.
void set_line_taker(LineTaker* taker);
/// Whether the line was taken.
bool take_line(const std::string& line, bool warning);

/// Standard output of a run: lines that stay and, on a terminal, one live line below them.
class Terminal {
 public:
  /// `interactive` false: no live line, and lines as long as they are.
  explicit Terminal(bool interactive) : interactive_(interactive) {}
  ~Terminal();
  /// Whether standard output is a terminal that can go back in a line: not TERM=dumb.
  static bool available();
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  /// Columns of a line: 80, or those of a narrower terminal.
  [[nodiscard]] std::size_t width() const;
  /// Prints a line that stays, or several. A single one that is too wide for the terminal is broken
  /// at its spaces.
  void show(const std::string& line) const;
  /// Replaces the live line; cuts what is too wide.
  void live(const std::string& line) const;

 private:
  bool interactive_;
};

/// Whether a view fills the terminal and takes all lines. Safe in a signal handler.
bool view_fills_terminal();
/// Moves the cursor back over the live line and erases it.
inline constexpr std::string_view kEraseLine = "\r\x1b[K";
/// Whether there was a live line, which then no longer counts as shown. Safe in a signal handler.
bool forget_live_line();
/// Erases the live line, if there is one, before something else is written to the terminal.
void erase_live_line();

/// Breaks `text` into lines of at most `width` columns, each starting with `indent`.
std::string wrap(const std::string& text, std::size_t width, const std::string& indent);

}  // namespace ballast::tools
