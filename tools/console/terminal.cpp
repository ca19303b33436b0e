#include "tools/console/terminal.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <sstream>
#include <string_view>
#include <system_error>
#include <thread>

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ballast/core/memory.h"

#include "tools/signals.h"

namespace ballast::tools {

namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kLongestPause = std::chrono::seconds(1);
constexpr auto kPause = std::chrono::milliseconds(5);

/// Whether a stream has not taken anything after a signal.
std::atomic<bool>& is_stuck(int stream) {
  static std::array<std::atomic<bool>, 3> stuck = {};
  return stuck.at(static_cast<std::size_t>(stream));
}

/// Opens a pipe or terminal once more, for writes that do not wait. The mode belongs to this open
/// file, so other users of the stream do not notice.
Descriptor open_again(int stream) {
  struct stat status = {};
  const bool may_wait =
      isatty(stream) == 1 || (fstat(stream, &status) == 0 && S_ISFIFO(status.st_mode));
  if (!may_wait) return {};
  const std::string path = fmt::format("/proc/self/fd/{}", stream);
  return Descriptor(::open(path.c_str(), O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
}

/// The descriptor for writes after a signal.
int patient_descriptor(int stream) {
  static const std::array<Descriptor, 3> opened = {Descriptor(), open_again(STDOUT_FILENO),
                                                   open_again(STDERR_FILENO)};
  const Descriptor& found = opened.at(static_cast<std::size_t>(stream));
  return found.is_open() ? found.number() : stream;
}

}  // namespace

int write_output(int stream, std::string_view text) {
  if (is_stuck(stream)) return ETIMEDOUT;
  if (stream == STDOUT_FILENO && std::fflush(stdout) != 0) return errno;
  auto last_taken = Clock::now();
  while (!text.empty()) {
    const bool patient = interrupted();
    const ssize_t done =
        ::write(patient ? patient_descriptor(stream) : stream, text.data(), text.size());
    if (done > 0) {
      text.remove_prefix(static_cast<std::size_t>(done));
      last_taken = Clock::now();
    } else if (done < 0 && errno == EAGAIN) {
      if (patient && Clock::now() - last_taken > kLongestPause) {
        is_stuck(stream) = true;
        return ETIMEDOUT;
      }
      std::this_thread::sleep_for(kPause);
    } else if (done < 0 && errno != EINTR) {
      return errno;
    }
  }
  return 0;
}

void print_error(std::string_view message) {
  write_output(STDERR_FILENO, fmt::format("ballast: error: {}\n", message));
}

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

namespace {

std::atomic<const char*>& ending_words() {
  static std::atomic<const char*> words = nullptr;
  return words;
}

/// Writes what the stream takes without a wait, because the work cannot continue before.
void write_all(int descriptor, std::string_view text) {
  pollfd file = {.fd = descriptor, .events = POLLOUT, .revents = 0};
  while (!text.empty() && poll(&file, 1, 0) > 0) {
    const ssize_t done = write(descriptor, text.data(), text.size());
    if (done <= 0) return;
    text.remove_prefix(static_cast<std::size_t>(done));
  }
}

/// Runs in the signal handler: no allocation, no lock, no stream.
void say_ending(int number) {
  const char* const words = ending_words().load();
  if (words == nullptr || view_fills_terminal()) return;
  const int before = errno;
  std::array<char, 512> line{};
  std::size_t length = 0;
  const auto add = [&](std::string_view text) {
    const std::size_t count = std::min(text.size(), line.size() - length);
    std::memcpy(line.data() + length, text.data(), count);
    length += count;
  };
  if (forget_live_line()) write_all(STDOUT_FILENO, kEraseLine);
  add("ballast: ");
  add(number == SIGINT ? "SIGINT: " : number == SIGHUP ? "SIGHUP: " : "SIGTERM: ");
  add(words);
  static_assert(kSignalGrace == std::chrono::seconds(2));
  add("; a second signal after 2 seconds ends it at once\n");
  write_all(STDERR_FILENO, {line.data(), length});
  errno = before;
}

}  // namespace

void announce_ending(const char* ending) {
  ending_words().store(ending);
  at_first_signal(say_ending);
}

}  // namespace ballast::tools
