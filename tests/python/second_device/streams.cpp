#include "streams.h"

#include <array>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

namespace second_device {

using Clock = std::chrono::steady_clock;

struct Mark {
  bool reached = false;
  Clock::time_point when;
};

namespace {

struct Entry {
  Kind kind = Kind::housekeeping;
  std::function<void()> task;
};

struct Stream {
  std::condition_variable arrived;  // an entry in the queue, for the thread of the stream
  std::deque<Entry> entries;
  bool running = false;  // an entry that is no longer in the queue
  bool started = false;
};

struct Device {
  std::mutex mutex;
  std::condition_variable changed;
  std::array<Stream, kStreams> streams;
  std::exception_ptr error;
  double kernel_seconds = 0;
  double copy_seconds = 0;
  StreamId next = 1;
};

// Is never destroyed, since threads use it until the process ends.
Device& device() {
  static auto* one = new Device;
  return *one;
}

thread_local StreamId stream_of_thread = 0;

void run_entry(const Entry& entry, double seconds) {
  try {
    if (seconds > 0) std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    entry.task();
  } catch (...) {
    std::lock_guard lock(device().mutex);
    if (!device().error) device().error = std::current_exception();
  }
}

void serve(Stream& stream) {
  Device& d = device();
  std::unique_lock lock(d.mutex);
  for (;;) {
    stream.arrived.wait(lock, [&] { return !stream.entries.empty(); });
    Entry entry = std::move(stream.entries.front());
    stream.entries.pop_front();
    stream.running = true;
    const double seconds = entry.kind == Kind::kernel ? d.kernel_seconds
                           : entry.kind == Kind::copy ? d.copy_seconds
                                                      : 0;
    lock.unlock();
    run_entry(entry, seconds);
    entry = {};
    lock.lock();
    stream.running = false;
    d.changed.notify_all();
  }
}

void append(StreamId id, Entry entry) {
  Device& d = device();
  Stream& stream = d.streams.at(id);
  std::lock_guard lock(d.mutex);
  if (!stream.started) {
    stream.started = true;
    std::thread([&stream] { serve(stream); }).detach();
  }
  stream.entries.push_back(std::move(entry));
  stream.arrived.notify_one();
}

bool is_idle(const Stream& stream) {
  return stream.entries.empty() && !stream.running;
}

template <typename Condition>
void wait_until(Condition condition) {
  Device& d = device();
  std::unique_lock lock(d.mutex);
  d.changed.wait(lock, condition);
  if (d.error) std::rethrow_exception(std::exchange(d.error, nullptr));
}

}  // namespace

void enqueue(StreamId stream, Kind kind, std::function<void()> task) {
  append(stream, {kind, std::move(task)});
}

MarkRef record(StreamId stream) {
  auto mark = std::make_shared<Mark>();
  append(stream, {Kind::housekeeping, [mark] {
                    std::lock_guard lock(device().mutex);
                    mark->reached = true;
                    mark->when = Clock::now();
                    device().changed.notify_all();
                  }});
  return mark;
}

void block(StreamId stream, const MarkRef& mark) {
  append(stream, {Kind::housekeeping, [mark] {
                    std::unique_lock lock(device().mutex);
                    device().changed.wait(lock, [&] { return mark->reached; });
                  }});
}

bool reached(const MarkRef& mark) {
  std::lock_guard lock(device().mutex);
  return mark->reached;
}

bool idle(StreamId stream) {
  std::lock_guard lock(device().mutex);
  return is_idle(device().streams.at(stream));
}

double seconds_between(const MarkRef& first, const MarkRef& last) {
  std::lock_guard lock(device().mutex);
  return std::chrono::duration<double>(last->when - first->when).count();
}

void synchronize(const MarkRef& mark) {
  wait_until([&] { return mark->reached; });
}

void synchronize(StreamId stream) {
  wait_until([&] { return is_idle(device().streams.at(stream)); });
}

void synchronize_all() {
  wait_until([] {
    for (const Stream& stream : device().streams)
      if (!is_idle(stream)) return false;
    return true;
  });
}

void set_delays(double kernel, double copy) {
  std::lock_guard lock(device().mutex);
  device().kernel_seconds = kernel;
  device().copy_seconds = copy;
}

StreamId current_stream() {
  return stream_of_thread;
}

StreamId exchange_stream(StreamId stream) {
  return std::exchange(stream_of_thread, stream);
}

StreamId new_stream() {
  std::lock_guard lock(device().mutex);
  const StreamId id = device().next;
  device().next = id + 1 < kStreams ? id + 1 : 1;
  return id;
}

}  // namespace second_device
