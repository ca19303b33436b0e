#include "tools/console/ending_notice.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <string_view>

#include <poll.h>
#include <unistd.h>

#include "tools/console/terminal.h"
#include "tools/process.h"

namespace ballast::tools {
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
