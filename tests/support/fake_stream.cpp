#include "tests/support/fake_stream.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/fake_cuda.h"
#include "tests/support/fake_memory.h"

namespace ballast::test {
namespace {

struct EventState {
  std::uint64_t recorded = 0;  ///< number of records enqueued
  std::uint64_t reached = 0;   ///< number of the last record performed
  double time = -1.0;          ///< GPU's clock at that record
};

/// An entry of a queue: work, or the record of an event, or a wait for it.
struct Item {
  std::function<bool()> work = nullptr;  ///< returns whether it is done
  const void* zeroed = nullptr;          ///< see on_stream()
  GpuSet gpus = 0;
  bool started = false;
  std::shared_ptr<EventState> event = nullptr;
  std::uint64_t record = 0;
  bool waits = false;

  [[nodiscard]] bool is_blocked() const { return waits && event->reached < record; }
};

struct Queue {
  std::deque<Item> items = {};
  std::uint64_t added = 0;
  std::uint64_t done = 0;
};

/// The habits of a GPU, which a seed chooses: how much of the work runs at the call that enqueues
/// it, and how often other streams run first.
struct Habits {
  double at_once;
  double some;
  double strays;
};
constexpr Habits kHabits[] = {
    {0.0, 0.0, 0.0}, {0.0, 0.3, 0.5}, {0.3, 0.4, 0.3}, {0.7, 0.1, 0.5}, {0.9, 0.0, 0.1}};

/// The streams of a process.
class Queues {
 public:
  void add(cudaStream_t stream, Item item) {
    std::unique_lock lock(mutex_);
    heed_seed();
    Queue& queue = queues_[stream];
    queue.items.push_back(std::move(item));
    const std::uint64_t number = ++queue.added;
    const double choice = draw();
    if (choice < habits_.at_once) {
      await(
          lock, stream, [&] { return queue.done >= number; }, Patience::none);
    } else if (choice < habits_.at_once + habits_.some) {
      run_some(lock);
    }
  }
  void await_stream(cudaStream_t stream) {
    std::unique_lock lock(mutex_);
    Queue& queue = queues_[stream];
    const std::uint64_t number = queue.added;
    await(
        lock, stream, [&] { return queue.done >= number; }, Patience::endless);
  }
  void await_all() {
    std::unique_lock lock(mutex_);
    for (auto& entry : queues_) {
      const Queue& queue = entry.second;
      const std::uint64_t number = queue.added;
      await(
          lock, entry.first, [&] { return queue.done >= number; }, Patience::endless);
    }
  }
  bool is_idle(cudaStream_t stream) {
    std::unique_lock lock(mutex_);
    Queue& queue = queues_[stream];
    const std::uint64_t number = queue.added;
    if (queue.done < number) run_for(lock, stream);
    return queue.done >= number;
  }
  std::size_t pending() {
    const std::scoped_lock lock(mutex_);
    std::size_t sum = 0;
    for (const auto& [stream, queue] : queues_) sum += queue.items.size();
    return sum;
  }

  std::shared_ptr<EventState> event(cudaEvent_t handle) {
    const std::scoped_lock lock(mutex_);
    auto& state = events_[handle];
    if (!state) state = std::make_shared<EventState>();
    return state;
  }
  std::uint64_t next_record(EventState& event) {
    const std::scoped_lock lock(mutex_);
    return ++event.recorded;
  }
  std::uint64_t last_record(const EventState& event) {
    const std::scoped_lock lock(mutex_);
    return event.recorded;
  }
  void await_event(const EventState& event) {
    std::unique_lock lock(mutex_);
    const std::uint64_t record = event.recorded;
    if (event.reached >= record) return;
    await(
        lock, stream_of(event, record), [&] { return event.reached >= record; }, Patience::endless);
  }
  bool is_over(const EventState& event) {
    std::unique_lock lock(mutex_);
    const std::uint64_t record = event.recorded;
    if (event.reached < record) run_for(lock, stream_of(event, record));
    return event.reached >= record;
  }
  double time_of(const EventState& event) {
    const std::scoped_lock lock(mutex_);
    return event.time;
  }
  void forget(cudaEvent_t handle) {
    const std::scoped_lock lock(mutex_);
    events_.erase(handle);
  }

 private:
  enum class Patience { none, endless };

  /// Starts the random numbers again after a change of the seed.
  void heed_seed() {
    const std::uint64_t seed = FakeCuda::seed;
    if (seed == seed_) return;
    seed_ = seed;
    random_.seed(seed);
    habits_ = kHabits[seed % std::size(kHabits)];
  }
  double draw() { return static_cast<double>(random_()) / static_cast<double>(random_.max()); }

  /// The stream that will record event number `record`.
  cudaStream_t stream_of(const EventState& event, std::uint64_t record) const {
    for (const auto& [stream, queue] : queues_) {
      for (const Item& item : queue.items) {
        if (!item.waits && item.event.get() == &event && item.record == record) return stream;
      }
    }
    return nullptr;
  }
  /// The stream whose next item must run before the next item of `stream` can.
  cudaStream_t runnable_for(cudaStream_t stream) {
    while (true) {
      const Queue& queue = queues_[stream];
      if (queue.items.empty() || !queue.items.front().is_blocked()) return stream;
      const Item& wait = queue.items.front();
      stream = stream_of(*wait.event, wait.record);
    }
  }
  cudaStream_t any_stream(cudaStream_t otherwise) {
    cudaStream_t chosen = otherwise;
    unsigned candidates = 0;
    for (const auto& [stream, queue] : queues_) {
      if (!queue.items.empty() && random_() % ++candidates == 0) chosen = stream;
    }
    return chosen;
  }

  /// Runs the next item of a stream. Returns whether that item is done. The caller has checked that
  /// no other thread runs one.
  bool run_next(std::unique_lock<std::mutex>& lock, cudaStream_t wanted) {
    Queue& queue = queues_[runnable_for(wanted)];
    if (queue.items.empty()) return false;
    Item& item = queue.items.front();
    bool done = true;
    if (item.work) {
      running_ = true;
      lock.unlock();
      // References to items of a deque stay valid when others are added.
      if (!item.started) FakeMemory::open(item.gpus, item.zeroed);
      item.started = true;
      done = FakeCuda::fault != 0 || item.work();
      if (done) FakeMemory::close(item.gpus);
      lock.lock();
      running_ = false;
    } else if (!item.waits) {
      item.event->reached = std::max(item.event->reached, item.record);
      item.event->time = FakeCuda::milliseconds;
    }
    if (done) {
      Item ended = std::move(item);  // its destructor may free what callers gave it
      queue.items.pop_front();
      ++queue.done;
    }
    changed_.notify_all();
    return done;
  }
  void run_some(std::unique_lock<std::mutex>& lock) {
    for (auto count = random_() % 4; count > 0 && !running_; --count) {
      run_next(lock, any_stream(nullptr));
    }
  }
  /// Runs what a caller that polls may see: nothing, or some work for its stream.
  void run_for(std::unique_lock<std::mutex>& lock, cudaStream_t stream) {
    if (draw() < habits_.strays) run_some(lock);
    if (draw() < 0.7 && !running_) run_next(lock, stream);
  }

  template <class Over>
  void await(std::unique_lock<std::mutex>& lock, cudaStream_t stream, const Over& over,
             Patience patience) {
    while (!over()) {
      if (running_) {
        if (patience == Patience::none) return;
        changed_.wait(lock);
        continue;
      }
      const bool stray = draw() < habits_.strays;
      if (run_next(lock, stray ? any_stream(stream) : stream)) continue;
      if (patience == Patience::none) return;
      lock.unlock();  // other processes must do something first
      std::this_thread::sleep_for(std::chrono::microseconds(50));
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;  ///< an item has run
  std::map<cudaStream_t, Queue> queues_;
  std::map<cudaEvent_t, std::shared_ptr<EventState>> events_;
  bool running_ = false;  ///< some thread performs an item
  std::uint64_t seed_ = 0;
  std::mt19937_64 random_;
  Habits habits_ = kHabits[0];
};

Queues& queues() {
  static auto* const kept = new Queues;  // streams may end after static objects
  return *kept;
}

/// Notes that the kernel's code is on the current GPU. Returns whether it was not.
bool note_loaded(const void* kernel) {
  static std::mutex mutex;
  static auto* const loaded = new std::set<std::pair<int, const void*>>;
  const std::scoped_lock lock(mutex);
  return loaded->emplace(FakeCuda::current(), kernel).second;
}

GpuSet current_gpu() {
  return GpuSet{1} << FakeCuda::current();
}

}  // namespace

cudaError_t on_stream(cudaStream_t stream, std::function<void()> work, const void* zeroed,
                      GpuSet others) {
  if (FakeCuda::seed == 0) {
    if (FakeCuda::fault == 0) work();
    return cudaSuccess;
  }
  queues().add(stream, {.work =
                            [work = std::move(work)] {
                              work();
                              return true;
                            },
                        .zeroed = zeroed,
                        .gpus = others | current_gpu()});
  return cudaSuccess;
}
cudaError_t on_stream_until(cudaStream_t stream, std::function<bool()> ended) {
  queues().add(stream, {.work = std::move(ended), .gpus = current_gpu()});
  return cudaSuccess;
}
void await_stream(cudaStream_t stream) {
  queues().await_stream(stream);
}
void await_all_streams() {
  queues().await_all();
}
bool is_idle(cudaStream_t stream) {
  return queues().is_idle(stream);
}
std::size_t pending_work() {
  return queues().pending();
}

void record_event(cudaEvent_t event, cudaStream_t stream) {
  auto state = queues().event(event);
  const std::uint64_t record = queues().next_record(*state);
  queues().add(stream, {.event = std::move(state), .record = record});
  if (FakeCuda::seed == 0) queues().await_stream(stream);
}
void wait_for_event(cudaStream_t stream, cudaEvent_t event) {
  if (FakeCuda::seed == 0) return;
  auto state = queues().event(event);
  const std::uint64_t record = queues().last_record(*state);
  queues().add(stream, {.event = std::move(state), .record = record, .waits = true});
}
void await_event(cudaEvent_t event) {
  queues().await_event(*queues().event(event));
}
bool is_over(cudaEvent_t event) {
  return queues().is_over(*queues().event(event));
}
double time_of(cudaEvent_t event) {
  return queues().time_of(*queues().event(event));
}
void forget_event(cudaEvent_t event) {
  queues().forget(event);
}

cudaError_t load_kernel(const void* kernel) {
  if (const cudaError_t refused = FakeCuda::answer("cudaFuncGetAttributes")) return refused;
  note_loaded(kernel);
  return cudaSuccess;
}
cudaError_t launch_on_stream(cudaStream_t stream, const void* kernel, std::function<void()> grid) {
  if (const cudaError_t refused = FakeCuda::answer("cudaLaunchKernel")) return refused;
  if (note_loaded(kernel) && FakeCuda::NoAllocation::exists()) {
    ++FakeCuda::NoAllocation::refused;
    FakeCuda::complain("the first launch of a kernel inside a step, which loads its code");
    return cudaErrorNotPermitted;
  }
  return on_stream(stream, [grid = std::move(grid)] {
    auto& left = FakeCuda::kernels_until_fault;
    if (left >= 0 && left-- == 0) {
      FakeCuda::fault = cudaErrorIllegalAddress;
      return;
    }
    grid();
  });
}

}  // namespace ballast::test
