#include "tools/live/screen.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include "tools/console/terminal.h"
#include "tools/process.h"

namespace ballast::tools {
namespace {

constexpr std::string_view kEnter = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J";
constexpr std::string_view kLeave = "\x1b[?7h\x1b[?25h\x1b[?1049l";
// Terminals that support "synchronized output" show the whole frame at once; others ignore this.
constexpr std::string_view kBeginFrame = "\x1b[?2026h\x1b[H";
constexpr std::string_view kEndFrame = "\x1b[?2026l";

/// Data of the signal handlers.
struct SignalState {
  termios former = {};
  std::atomic<bool> entered = false;
  std::atomic<bool> stop = false;
  std::atomic<bool> resumed = false;
  std::atomic<int> event = -1;
};

SignalState& shared() {
  static SignalState all;
  return all;
}

void write_all(std::string_view text) {
  while (!text.empty()) {
    const auto count = ::write(STDOUT_FILENO, text.data(), text.size());
    if (count < 0 && errno != EINTR) return;  // the terminal is gone; the run has its files
    text.remove_prefix(count < 0 ? 0 : static_cast<std::size_t>(count));
  }
}

bool in_foreground() {
  return tcgetpgrp(STDIN_FILENO) == getpgrp();
}

/// Safe in signal handlers.
void restore() {
  if (!shared().entered.exchange(false)) return;
  write_all(kLeave);
  // In the background this call would stop the program, and the shell has set its own modes.
  if (in_foreground()) tcsetattr(STDIN_FILENO, TCSADRAIN, &shared().former);
}

void wake_by(int event) {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(event, &one, sizeof(one));
}

extern "C" void on_stop(int number) {
  const int error_number = errno;
  (number == SIGTSTP ? shared().stop : shared().resumed).store(true);
  wake_by(shared().event.load());
  errno = error_number;
}

extern "C" void on_end(int number) {
  restore();
  std::raise(number);  // SA_RESETHAND: ends the program
}

constexpr std::array kEnding = {SIGQUIT, SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL};

/// Sets `handler` for a signal that has its default handler. Returns whether it did.
bool handle(int number, void (*handler)(int), int flags) {
  struct sigaction former = {};
  struct sigaction action = {};
  action.sa_handler = handler;
  action.sa_flags = flags;
  const bool standard = sigaction(number, nullptr, &former) == 0 && former.sa_handler == SIG_DFL;
  return standard && sigaction(number, &action, nullptr) == 0;
}

void forget(int number, void (*handler)(int)) {
  struct sigaction former = {};
  if (sigaction(number, nullptr, &former) == 0 && former.sa_handler == handler) {
    std::signal(number, SIG_DFL);
  }
}

bool is_utf8() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    const char* const value = std::getenv(name);
    if (value == nullptr || *value == '\0') continue;
    std::string text = value;
    std::transform(text.begin(), text.end(), text.begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    return text.find("utf-8") != text.npos || text.find("utf8") != text.npos;
  }
  return false;
}

}  // namespace

bool Screen::available() {
  return Terminal::available() && isatty(STDIN_FILENO) == 1;
}

Screen::Screen() : event_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), unicode_(is_utf8()) {
  shared().event = event_.number();
  shared().stop = false;
  shared().resumed = false;
  at_sudden_end(restore);
  for (const int number : {SIGTSTP, SIGCONT}) handle(number, on_stop, SA_RESTART);
  for (const int number : kEnding) handle(number, on_end, static_cast<int>(SA_RESETHAND));
}

Screen::~Screen() {
  leave();
  for (const int number : {SIGTSTP, SIGCONT}) forget(number, on_stop);
  for (const int number : kEnding) forget(number, on_end);
  at_sudden_end(nullptr);
  shared().event = -1;
}

void Screen::enter() {
  if (!in_foreground() || tcgetattr(STDIN_FILENO, &shared().former) != 0) return;
  termios keys = shared().former;
  keys.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);
  keys.c_cc[VMIN] = 1;
  keys.c_cc[VTIME] = 0;
  shared().entered = true;
  tcsetattr(STDIN_FILENO, TCSADRAIN, &keys);
  write_all(kEnter);
  entered_ = true;
}

void Screen::leave() {
  restore();
  entered_ = false;
}

FrameOptions Screen::options() const {
  FrameOptions options = {.unicode = unicode_};
  const char* const no_colour = std::getenv("NO_COLOR");
  options.colour = no_colour == nullptr || *no_colour == '\0';
  winsize size = {};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 && size.ws_row > 0) {
    options.columns = size.ws_col;
    options.rows = size.ws_row;
  }
  return options;
}

void Screen::draw(const std::vector<std::string>& lines, std::size_t rows) const {
  if (!in_foreground()) return;
  std::string frame(kBeginFrame);
  for (std::size_t i = 0; i < lines.size(); ++i) frame += (i > 0 ? "\r\n" : "") + lines[i];
  if (lines.size() < rows) frame += "\r\n\x1b[J";  // "erase below"
  write_all(frame.append(kEndFrame));
}

Screen::Event Screen::wait(int milliseconds) {
  std::array<pollfd, 2> files = {pollfd{.fd = event_.number(), .events = POLLIN, .revents = 0},
                                 pollfd{.fd = STDIN_FILENO, .events = POLLIN, .revents = 0}};
  poll(files.data(), entered_ ? 2 : 1, milliseconds);
  std::uint64_t count = 0;
  [[maybe_unused]] auto got = ::read(event_.number(), &count, sizeof(count));
  if (shared().stop.exchange(false)) return Event::stop;
  if (shared().resumed.exchange(false)) return Event::resumed;
  if (entered_ && files[1].revents != 0) {
    std::array<char, 64> keys = {};
    got = ::read(STDIN_FILENO, keys.data(), keys.size());
    if (got == 0 || (got < 0 && errno != EINTR)) return Event::quit;  // the terminal is gone
    const std::string_view pressed(keys.data(), got > 0 ? static_cast<std::size_t>(got) : 0);
    if (pressed.find_first_of("qQ") != pressed.npos) return Event::quit;
  }
  return Event::none;
}

void Screen::wake() const {
  wake_by(event_.number());
}

void Screen::stop() {
  leave();
  forget(SIGTSTP, on_stop);
  std::raise(SIGTSTP);
  handle(SIGTSTP, on_stop, SA_RESTART);
}

}  // namespace ballast::tools
