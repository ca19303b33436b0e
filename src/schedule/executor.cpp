#include "ballast/schedule/executor.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <pthread.h>

#include "ballast/core/error.h"
#include "ballast/core/random.h"

namespace ballast::schedule {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kInterruptPoll = std::chrono::milliseconds(50);

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

using Seam = std::vector<std::vector<OpId>>;

/// One submitted plan.
struct Run {
  const Plan* plan = nullptr;
  std::uint64_t number = 0;
  std::vector<char> done;
  std::size_t remaining = 0;
  std::shared_ptr<Run> previous;  ///< until it is finished and a next one is submitted
  const Seam* seam = nullptr;     ///< between the previous run and this one

  [[nodiscard]] bool finished() const { return remaining == 0; }

  [[nodiscard]] bool ready(OpId id) const {
    for (const OpId before : plan->operations[id].after) {
      if (done[before] == 0) return false;
    }
    if (previous == nullptr) return true;
    for (const OpId before : (*seam)[id]) {
      if (previous->done[before] == 0) return false;
    }
    return true;
  }
};

struct Item {
  std::shared_ptr<Run> run;
  OpId id = kNoOp;
};

}  // namespace

struct Executor::State {
  Handler handler;
  Namer namer;
  ExecutorOptions options;

  mutable std::mutex mutex;
  std::condition_variable changed;
  std::array<std::deque<Item>, kLaneCount> queues;
  std::shared_ptr<Run> last;
  std::map<std::pair<const Plan*, const Plan*>, Seam> seams;
  std::size_t unfinished_runs = 0;
  std::exception_ptr failure;
  bool stopping = false;
  LaneTotals totals;
  Clock::time_point birth = Clock::now();
  std::vector<std::thread> threads;

  [[nodiscard]] bool interrupted() const {
    return options.interrupted != nullptr && options.interrupted->load();
  }

  /// With the lock held: an interrupt becomes the failure; a failure is thrown.
  void throw_failure() {
    if (!failure && interrupted()) {
      failure = std::make_exception_ptr(Error(ErrorCategory::interrupted, "interrupted"));
      changed.notify_all();
    }
    if (failure) std::rethrow_exception(failure);
  }

  /// Waits on `lock` until `condition` or a failure, looking for interrupts now and then.
  template <class Condition>
  void wait_for(std::unique_lock<std::mutex>& lock, Condition condition) {
    throw_failure();
    while (!condition()) {
      changed.wait_for(lock, kInterruptPoll);
      throw_failure();
    }
  }

  const Seam& seam_between(const Plan& before, const Plan& next) {
    const auto key = std::make_pair(&before, &next);
    const auto found = seams.find(key);
    return found != seams.end() ? found->second
                                : seams.emplace(key, seam(before, next)).first->second;
  }

  void delay(const Run& run, OpId id) const {
    if (!options.delay_seed) return;
    const auto word = random_u64(*options.delay_seed, run.number, id);
    std::this_thread::sleep_for(std::chrono::microseconds(word % 300));
  }

  [[nodiscard]] double now() const { return seconds_since(birth); }

  /// Runs one operation without the lock; returns its failure, named.
  std::exception_ptr perform(const Run& run, Span& span) const {
    const Operation& operation = span.operation();
    std::exception_ptr result;
    delay(run, span.op);
    span.start = now();
    try {
      handler(operation, run.number);
    } catch (const Error& error) {
      result = std::make_exception_ptr(error.with_context(namer(operation)));
    } catch (const std::exception& error) {
      result = std::make_exception_ptr(
          Error(ErrorCategory::state, namer(operation) + ": " + error.what()));
    }
    span.end = now();
    return result;
  }

  /// With the lock held: books a finished operation.
  void complete(Run& run, const Span& span, const std::exception_ptr& error) {
    const Operation& operation = span.operation();
    const auto lane = static_cast<std::size_t>(operation.lane);
    totals.busy_seconds[lane] += span.end - span.start;
    totals.bytes[lane] += operation.bytes;
    if (options.observer) options.observer(span);
    if (error && !failure) failure = error;
    run.done[span.op] = 1;
    if (--run.remaining == 0) --unfinished_runs;
    changed.notify_all();
  }

  void run_lane(std::size_t lane) {
    std::unique_lock lock(mutex);
    auto& queue = queues[lane];
    while (true) {
      changed.wait(lock, [&] { return stopping || (!queue.empty() && !failure); });
      if (stopping) return;
      const Item item = queue.front();
      const auto waiting_since = Clock::now();
      changed.wait(lock, [&] { return stopping || failure || item.run->ready(item.id); });
      totals.stalled_seconds[lane] += seconds_since(waiting_since);
      if (stopping) return;
      if (failure) continue;
      if (interrupted()) {
        failure = std::make_exception_ptr(Error(ErrorCategory::interrupted, "interrupted"));
        changed.notify_all();
        continue;
      }
      queue.pop_front();
      lock.unlock();
      Span span = {item.run->plan, item.id, item.run->number, 0.0, 0.0};
      const auto error = perform(*item.run, span);
      lock.lock();
      complete(*item.run, span, error);
    }
  }

  void run_serially(const std::shared_ptr<Run>& run) {
    for (OpId id = 0; id < run->plan->operations.size(); ++id) {
      Span span = {run->plan, id, run->number, 0.0, 0.0};
      const auto error = perform(*run, span);
      const std::scoped_lock lock(mutex);
      complete(*run, span, error);
      throw_failure();
    }
  }
};

Executor::Executor(Handler handler, Namer namer, const ExecutorOptions& options)
    : state_(std::make_unique<State>()) {
  state_->handler = std::move(handler);
  state_->namer = std::move(namer);
  state_->options = options;
  if (options.serial) return;
  for (std::size_t lane = 0; lane < kLaneCount; ++lane) {
    state_->threads.emplace_back([state = state_.get(), lane] { state->run_lane(lane); });
    const std::string name(to_string(kLanes[lane]));
    pthread_setname_np(state_->threads.back().native_handle(), name.c_str());
  }
}

Executor::~Executor() {
  {
    const std::scoped_lock lock(state_->mutex);
    state_->stopping = true;
  }
  state_->changed.notify_all();
  for (auto& thread : state_->threads) thread.join();
}

void Executor::submit(const Plan& plan, std::uint64_t number) {
  auto run = std::make_shared<Run>();
  run->plan = &plan;
  run->number = number;
  run->done.assign(plan.operations.size(), 0);
  run->remaining = plan.operations.size();
  if (plan.operations.empty()) return;
  {
    std::unique_lock lock(state_->mutex);
    if (state_->last != nullptr) {
      // A seam orders two neighbours only, so what came before the last run must be over. It can
      // outlast the last run: an evaluation ends while states are still written back.
      std::shared_ptr<Run>& before_last = state_->last->previous;
      state_->wait_for(lock, [&] { return before_last == nullptr || before_last->finished(); });
      before_last.reset();
      run->previous = state_->last;
      run->seam = &state_->seam_between(*state_->last->plan, plan);
    }
    state_->last = run;
    ++state_->unfinished_runs;
    if (!state_->options.serial) {
      for (OpId id = 0; id < plan.operations.size(); ++id) {
        const auto lane = static_cast<std::size_t>(plan.operations[id].lane);
        state_->queues[lane].push_back({run, id});
      }
    }
  }
  state_->changed.notify_all();
  if (state_->options.serial) state_->run_serially(run);
}

void Executor::wait(OpId id) {
  std::unique_lock lock(state_->mutex);
  expects(state_->last != nullptr && id < state_->last->done.size(),
          "executor: waiting for an operation that was not submitted");
  state_->wait_for(lock, [&] { return state_->last->done[id] != 0; });
}

void Executor::drain() {
  std::unique_lock lock(state_->mutex);
  state_->wait_for(lock, [&] { return state_->unfinished_runs == 0; });
}

LaneTotals Executor::totals() const {
  const std::scoped_lock lock(state_->mutex);
  return state_->totals;
}

}  // namespace ballast::schedule
