#include "tools/console/terminal.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <sstream>
#include <string_view>
#include <system_error>

#include <sys/ioctl.h>
#include <unistd.h>

#include "tools/console/output.h"

namespace ballast::tools {
namespace {

constexpr std::size_t kWidth = 80;
constexpr std::size_t kNarrowest = 20;

/// Whether the cursor is at the end of a live line. Any thread may print warnings.
std::atomic<bool>& live_line() {
  static std::atomic<bool> shown = false;
  return shown;
}

/// Column at which the value of "  name   value" or "data   value" starts; 0 for other lines.
std::size_t value_column(const std::string& line) {
  for (const std::size_t column : {std::size_t{20}, std::size_t{7}}) {
    if (line.size() <= column || line[column] == ' ' || line[column - 1] != ' ') continue;
    if (column == 20 ? line.starts_with("  ") : line[column - 2] == ' ' && line[0] != ' ') {
      return column;
    }
  }
  return 0;
}

struct Taker {
  std::mutex mutex;
  LineTaker* taker = nullptr;
};

Taker& taker() {
  static Taker only;
  return only;
}

/// Whether there is a taker, for callers that cannot wait for the mutex.
std::atomic<bool>& has_taker() {
  static std::atomic<bool> has = false;
  return has;
}

std::string fit(const std::string& line, std::size_t width) {
  if (line.size() <= width) return line;
  const std::size_t column = value_column(line);
  return wrap(line.substr(column), width, std::string(column, ' '))
      .replace(0, column, line.substr(0, column));
}

}  // namespace

void set_line_taker(LineTaker* given) {
  const std::lock_guard lock(taker().mutex);
  taker().taker = given;
  has_taker() = given != nullptr;
}

bool take_line(const std::string& line, bool warning) {
  const std::lock_guard lock(taker().mutex);
  return taker().taker != nullptr && taker().taker->take(line, warning);
}

std::string wrap(const std::string& text, std::size_t width, const std::string& indent) {
  std::istringstream words(text);
  std::string result;
  std::string line = indent;
  for (std::string word; words >> word;) {
    if (line.size() > indent.size() && line.size() + 1 + word.size() > width) {
      result += line + "\n";
      line = indent;
    }
    line += (line.size() > indent.size() ? " " : "") + word;
  }
  return result + line;
}

bool view_fills_terminal() {
  return has_taker();
}

bool forget_live_line() {
  return live_line().exchange(false);
}

void erase_live_line() {
  if (forget_live_line()) write_output(STDOUT_FILENO, kEraseLine);
}

Terminal::~Terminal() {
  erase_live_line();
}

bool Terminal::available() {
  const char* const type = std::getenv("TERM");
  return isatty(STDOUT_FILENO) == 1 && (type == nullptr || std::string_view(type) != "dumb");
}

std::size_t Terminal::width() const {
  winsize size = {};
  if (!interactive_ || ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) {
    return kWidth;
  }
  return std::clamp<std::size_t>(size.ws_col, kNarrowest, kWidth);
}

void Terminal::print(std::string_view text) const {
  const int error_number = write_output(STDOUT_FILENO, text);
  if (error_number == 0) return;
  if (on_failure_) return on_failure_(error_number);
  throw std::system_error(error_number, std::generic_category(), "cannot write to standard output");
}

void Terminal::show(const std::string& line) const {
  const bool broken = line.find('\n') != std::string::npos;
  const std::string text = interactive_ && !broken ? fit(line, width()) : line;
  if (take_line(text, false)) return;
  erase_live_line();
  print(text + "\n");
}

void Terminal::live(const std::string& line) const {
  if (!interactive_ || view_fills_terminal()) return;
  erase_live_line();
  // In the last column some terminals break the line.
  print(line.substr(0, width() - 1));
  live_line() = true;
}

}  // namespace ballast::tools
