#include "ballast/core/clocks.h"

#include <ctime>
#include <mutex>
#include <utility>

#include "ballast/core/error.h"

namespace ballast {

namespace {

struct RecordedSpans {
  std::mutex mutex;
  std::vector<KernelSpan> spans;
};

RecordedSpans& recorded() {
  static RecordedSpans all;
  return all;
}

double seconds_of(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace

double process_cpu_seconds() {
  return seconds_of(CLOCK_PROCESS_CPUTIME_ID);
}

double thread_cpu_seconds() {
  return seconds_of(CLOCK_THREAD_CPUTIME_ID);
}

std::string_view to_string(KernelGroup group) {
  constexpr std::array<std::string_view, kKernelGroups> kNames = {
      "product",       "widening",  "attention", "delta rule",  "norm",    "rotary", "activation",
      "cross entropy", "embedding", "experts",   "elementwise", "packing", "pass",   "update"};
  return kNames[static_cast<std::size_t>(group)];
}

KernelRecording::KernelRecording() {
  expects(!KernelClock::is_recording.exchange(true), "kernels are recorded already");
}

KernelRecording::~KernelRecording() {
  KernelClock::is_recording = false;
  take();
}

std::vector<KernelSpan> KernelRecording::take() {
  const std::lock_guard lock(recorded().mutex);
  return std::exchange(recorded().spans, {});
}

void KernelClock::add(KernelSpan span) {
  span.end = std::chrono::steady_clock::now();
  const std::lock_guard lock(recorded().mutex);
  if (is_recording) recorded().spans.push_back(span);
}

}  // namespace ballast
