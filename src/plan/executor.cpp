#include "ballast/plan/executor.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <pthread.h>

#include "ballast/core/clocks.h"
#include "ballast/core/error.h"
#include "ballast/core/random.h"

#include "src/plan/lane_queue.h"
#include "src/plan/ordering.h"

namespace ballast::plan {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kInterruptPoll = std::chrono::milliseconds(50);

}  // namespace

struct Executor::State {
  State(Handler handler, Names names, const ExecutorOptions& options)
      : handler(std::move(handler)),
        names(std::move(names)),
        options(options),
        lanes(lane_count(options.devices)) {}

  Handler handler;
  Names names;
  ExecutorOptions options;

  mutable std::mutex mutex;
  std::condition_variable progressed;  ///< for callers
  std::vector<LaneQueue> lanes;        ///< by lane_number()
  std::shared_ptr<Submission> last;
  std::map<std::pair<const Plan*, const Plan*>, Seam> seams;
  std::map<const Plan*, Turns> turns;
  std::array<SubmittedOperation, kMaxDevices>
      last_collective;  ///< by device: the last enqueued one
  std::size_t unfinished = 0;
  std::exception_ptr failure;
  bool stopping = false;      ///< no further operation starts
  bool all_enqueued = false;  ///< no further operation is enqueued
  LaneTotals totals;
  Clock::time_point birth = Clock::now();
  std::vector<std::thread> starting;
  std::vector<std::thread> finishing;

  [[nodiscard]] bool queued(std::size_t lane) const {
    return options.finish != nullptr && is_queued(lane_at(lane).lane, options.follow != nullptr);
  }

  /// Returns the contribution of one lane to the mean over the devices.
  [[nodiscard]] double mean(Lane lane, double seconds) const {
    return is_per_device(lane) ? seconds / options.devices : seconds;
  }

  void add_busy(LaneTotals& sums, std::size_t number, double seconds) const {
    const Lane lane = lane_at(number).lane;
    sums.busy_seconds[static_cast<std::size_t>(lane)] += mean(lane, seconds);
    sums.busy_by_device[number] += seconds;
  }
  void add_stalled(LaneTotals& sums, std::size_t number, double seconds) const {
    const Lane lane = lane_at(number).lane;
    sums.stalled_seconds[static_cast<std::size_t>(lane)] += mean(lane, seconds);
    sums.stalled_by_device[number] += seconds;
  }

  /// With the lock held: turns an interrupt into a failure. Returns whether there was one.
  bool check_interrupt() {
    if (options.interrupted == nullptr || !options.interrupted->load()) return false;
    fail(std::make_exception_ptr(Error(ErrorCategory::interrupted, "interrupted")));
    return true;
  }

  /// With the lock held: wakes all threads after a failure, or at the end.
  void wake_all() {
    for (LaneQueue& lane : lanes) {
      lane.may_start.notify_one();
      lane.may_finish.notify_one();
    }
    progressed.notify_all();
  }

  /// With the lock held: throws the failure; an interrupt counts as one.
  void throw_failure() {
    if (!failure) check_interrupt();
    if (failure) std::rethrow_exception(failure);
  }

  /// Waits on `lock` until `condition` or a failure; polls for interrupts.
  template <class Condition>
  void wait_for(std::unique_lock<std::mutex>& lock, Condition condition) {
    throw_failure();
    while (!condition()) {
      progressed.wait_for(lock, kInterruptPoll);
      throw_failure();
    }
  }

  const Seam& seam_between(const Plan& before, const Plan& next) {
    const auto key = std::make_pair(&before, &next);
    const auto found = seams.find(key);
    return found != seams.end() ? found->second
                                : seams.emplace(key, seam(before, next)).first->second;
  }

  /// Returns nullptr if no operation takes a turn.
  const Turns* turns_in(const Plan& plan) {
    if (!options.takes_turn) return nullptr;
    const auto found = turns.find(&plan);
    if (found != turns.end()) return &found->second;
    return &turns.emplace(&plan, turns_of(plan, options.takes_turn)).first->second;
  }

  void delay(const LaneItem& item, std::uint64_t salt) const {
    if (!options.delay_seed) return;
    const auto word =
        random_u64(*options.delay_seed, item.submission(), item.submitted.id + (salt << 32U));
    std::this_thread::sleep_for(std::chrono::microseconds(word % 300));
  }

  [[nodiscard]] double now() const { return seconds_since(birth); }

  /// Calls `handle` without the lock. Returns its failure, with the operation's name.
  std::exception_ptr call(const Handler& handle, const LaneItem& item) const {
    const Operation& operation = item.operation();
    try {
      handle(operation, item.submission());
    } catch (const Error& error) {
      return std::make_exception_ptr(error.with_context(names(operation)));
    } catch (const std::bad_alloc&) {
      return std::make_exception_ptr(
          Error(ErrorCategory::memory, names(operation) + ": out of memory"));
    } catch (const std::exception& error) {
      return std::make_exception_ptr(
          Error(ErrorCategory::state, names(operation) + ": " + error.what()));
    }
    return nullptr;
  }

  std::exception_ptr start(const LaneItem& item) const {
    delay(item, 0);
    const auto follow_and_start = [&](const Operation& operation, std::uint64_t submission) {
      for (const SubmittedOperation& before : item.followed) {
        options.follow(operation, before.operation(), before.submission->number);
      }
      handler(operation, submission);
    };
    return call(follow_and_start, item);
  }

  std::exception_ptr finish(const LaneItem& item) const {
    delay(item, 1);
    return call(options.finish, item);
  }

  /// With the lock held.
  void fail(const std::exception_ptr& error) {
    if (!failure) failure = error;
    wake_all();
  }

  /// Wakes the lanes that can start or finish an operation, and callers. Releases `lock` meanwhile,
  /// so that they find it free.
  void wake(std::unique_lock<std::mutex>& lock, bool callers) {
    std::array<bool, lane_count(kMaxDevices)> startable{};
    std::array<bool, lane_count(kMaxDevices)> finishable{};
    for (std::size_t each = 0; each < lanes.size(); ++each) {
      startable[each] = lanes[each].can_start();
      finishable[each] = lanes[each].can_finish();
    }
    lock.unlock();
    for (std::size_t each = 0; each < lanes.size(); ++each) {
      if (startable[each]) lanes[each].may_start.notify_one();
      if (finishable[each]) lanes[each].may_finish.notify_one();
    }
    if (callers) progressed.notify_all();
    lock.lock();
  }

  /// Accounts for a finished operation and wakes the threads that wait for it.
  void complete(std::unique_lock<std::mutex>& lock, const LaneItem& item) {
    const Operation& operation = item.operation();
    const std::size_t number = lane_number(operation);
    LaneQueue& lane = lanes[number];
    Submission& submission = *item.submitted.submission;
    const OpId id = item.submitted.id;
    const double enqueued = std::max(item.begun, lane.free_since);
    const Span span = {submission.plan, id, submission.number,
                       std::max(enqueued, item.end_of_followed()), now()};
    add_stalled(totals, number, span.start - enqueued);
    lane.free_since = span.end;
    if (submission.streams_wait) submission.ends[id] = span.end;
    add_busy(totals, number, span.end - span.start);
    totals.bytes[static_cast<std::size_t>(operation.lane)] += operation.bytes;
    if (options.observer) options.observer(span);
    submission.progress[id] = Progress::finished;
    if (--submission.remaining == 0) --unfinished;
    wake(lock, submission.is_awaited(id));
  }

  /// With the lock held: waits until the lane can start its next operation. Returns false if the
  /// executor stops or has failed.
  bool await_inputs(std::unique_lock<std::mutex>& lock, std::size_t number) {
    LaneQueue& lane = lanes[number];
    lane.waiting_since = now();
    lane.may_start.wait(lock, [&] { return stopping || failure || lane.can_start(); });
    add_stalled(totals, number, lane.stalled_until(now()));
    lane.waiting_since.reset();
    return !stopping && !failure && !check_interrupt();
  }

  /// With the lock held: notes the operations for which the stream of `item` must wait. A pass that
  /// exchanges data also waits for the collectives with earlier turns.
  void follow_predecessors(LaneItem& item) const {
    if (options.follow == nullptr) return;
    item.follow_needed();
    const Operation& operation = item.operation();
    const SubmittedOperation& collective = last_collective[operation.device];
    const SubmittedOperation& own = item.submitted;
    if (own.submission->takes_turn(own.id) && !is_collective_lane(operation.lane) &&
        collective.submission != nullptr && collective.is(Progress::enqueued)) {
      item.followed.push_back(collective);
    }
  }

  void start_operations(std::size_t number) {
    std::unique_lock lock(mutex);
    LaneQueue& lane = lanes[number];
    while (true) {
      lane.may_start.wait(lock, [&] { return stopping || (!lane.waiting.empty() && !failure); });
      if (stopping) return;
      if (!await_inputs(lock, number)) continue;
      LaneItem item = std::move(lane.waiting.front());
      lane.waiting.pop_front();
      item.begun = now();
      follow_predecessors(item);
      lane.starting_since = item.begun;
      lock.unlock();
      const auto error = start(item);
      lock.lock();
      lane.starting_since.reset();
      if (error) {
        fail(error);
        continue;
      }
      Submission& submission = *item.submitted.submission;
      const bool turn_ends = submission.takes_turn(item.submitted.id);
      if (turn_ends) ++submission.ended_turns[item.operation().device];
      if (queued(number)) {
        const Lane kind = lane_at(number).lane;
        totals.enqueueing_seconds[static_cast<std::size_t>(kind)] += mean(kind, now() - item.begun);
        submission.progress[item.submitted.id] = Progress::enqueued;
        if (is_collective_lane(kind)) last_collective[item.operation().device] = item.submitted;
        lane.enqueued.push_back(std::move(item));
        lock.unlock();
        lane.may_finish.notify_one();
        lock.lock();
        if (turn_ends || options.follow != nullptr) wake(lock, false);
      } else {
        complete(lock, item);
      }
    }
  }

  /// Runs until nothing is enqueued, because enqueued operations use the caller's memory.
  void finish_operations(std::size_t number) {
    std::unique_lock lock(mutex);
    LaneQueue& lane = lanes[number];
    while (true) {
      lane.may_finish.wait(lock, [&] {
        return lane.enqueued.empty() ? all_enqueued : lane.can_finish() || failure != nullptr;
      });
      if (lane.enqueued.empty()) return;
      const LaneItem item = lane.enqueued.front();
      lock.unlock();
      const auto error = finish(item);
      lock.lock();
      lane.enqueued.pop_front();
      if (error) {
        fail(error);
      } else {
        complete(lock, item);
      }
    }
  }

  void run_serially(const std::shared_ptr<Submission>& submission) {
    for (OpId id = 0; id < submission->plan->operations.size(); ++id) {
      const LaneItem item = {{submission, id}, now()};
      auto error = start(item);
      if (!error && queued(lane_number(item.operation()))) error = finish(item);
      std::unique_lock lock(mutex);
      if (error) {
        fail(error);
      } else {
        complete(lock, item);
      }
      throw_failure();
    }
  }

  void make_threads() {
    try {
      for (std::size_t lane = 0; lane < lanes.size(); ++lane) make_threads(lane);
    } catch (const std::system_error& error) {
      end();
      throw Error(ErrorCategory::memory, "cannot start the thread of a lane", error.code().value());
    } catch (...) {
      end();
      throw;
    }
  }

  void make_threads(std::size_t lane) {
    const auto [kind, device] = lane_at(lane);
    std::string name(to_string(kind));
    if (device > 0) name += std::to_string(device);
    starting.emplace_back([this, lane] { start_operations(lane); });
    pthread_setname_np(starting.back().native_handle(), name.c_str());
    if (!queued(lane)) return;
    finishing.emplace_back([this, lane] { finish_operations(lane); });
    pthread_setname_np(finishing.back().native_handle(), (name + " end").c_str());
  }

  void end() {
    join(starting, stopping);
    join(finishing, all_enqueued);
  }

  /// Ends `threads` by setting `flag`, and waits for them.
  void join(std::vector<std::thread>& threads, bool& flag) {
    {
      const std::scoped_lock lock(mutex);
      flag = true;
      wake_all();
    }
    for (auto& thread : threads) thread.join();
  }
};

Executor::Executor(Handler handler, Names names, const ExecutorOptions& options)
    : state_(std::make_unique<State>(std::move(handler), std::move(names), options)) {
  for (std::size_t lane = 0; lane < state_->lanes.size(); ++lane) {
    state_->lanes[lane].most =
        is_on_stream(lane_at(lane).lane) ? options.max_on_stream : kMaxEnqueued;
  }
  if (!options.serial) state_->make_threads();
}

Executor::~Executor() {
  state_->end();
}

void Executor::submit(const Plan& plan, std::uint64_t number) {
  auto submission = std::make_shared<Submission>();
  submission->plan = &plan;
  submission->number = number;
  submission->progress.assign(plan.operations.size(), Progress::waiting);
  submission->remaining = plan.operations.size();
  submission->streams_wait = state_->options.follow != nullptr;
  if (submission->streams_wait) submission->ends.resize(plan.operations.size());
  expects(std::all_of(plan.operations.begin(), plan.operations.end(),
                      [this](const Operation& operation) {
                        return lane_number(operation) < state_->lanes.size();
                      }),
          "executor: the plan has more devices than the executor");
  if (plan.operations.empty()) return;
  {
    std::unique_lock lock(state_->mutex);
    if (state_->last != nullptr) {
      // A seam orders only two neighbours, so the second-last submission must have finished. It can
      // outlast the last one: an evaluation may end while states are still being written back.
      std::shared_ptr<Submission>& before_last = state_->last->previous;
      state_->wait_for(lock, [&] { return before_last == nullptr || before_last->finished(); });
      before_last.reset();
      submission->previous = state_->last;
      submission->seam = &state_->seam_between(*state_->last->plan, plan);
    }
    submission->turns = state_->turns_in(plan);
    state_->last = submission;
    ++state_->unfinished;
    if (!state_->options.serial) {
      for (OpId id = 0; id < plan.operations.size(); ++id) {
        state_->lanes[lane_number(plan.operations[id])].waiting.push_back({{submission, id}});
      }
      for (LaneQueue& lane : state_->lanes) lane.may_start.notify_one();
    }
  }
  if (state_->options.serial) state_->run_serially(submission);
}

void Executor::wait(OpId id) {
  std::unique_lock lock(state_->mutex);
  expects(state_->last != nullptr && id < state_->last->progress.size(),
          "executor: cannot wait for an operation that was not submitted");
  state_->last->awaited.push_back(id);
  state_->wait_for(lock, [&] { return state_->last->progress[id] == Progress::finished; });
}

void Executor::drain() {
  std::unique_lock lock(state_->mutex);
  state_->wait_for(lock, [&] { return state_->unfinished == 0; });
}

LaneTotals Executor::totals() const {
  const std::scoped_lock lock(state_->mutex);
  LaneTotals totals = state_->totals;
  const double now = state_->now();
  for (std::size_t number = 0; number < state_->lanes.size(); ++number) {
    const LaneQueue& queue = state_->lanes[number];
    state_->add_busy(totals, number, queue.busy_until(now));
    state_->add_stalled(totals, number, queue.stalled_until(now) + queue.stream_waits_until(now));
  }
  return totals;
}

}  // namespace ballast::plan
