#include "tools/console/output.h"

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <thread>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ballast/core/descriptor.h"

#include "tools/process.h"

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

}  // namespace ballast::tools
