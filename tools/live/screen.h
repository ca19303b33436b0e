#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "ballast/core/descriptor.h"

#include "tools/live/frame.h"

namespace ballast::tools {

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

}  // namespace ballast::tools
