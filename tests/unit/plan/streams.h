#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <initializer_list>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/plan/executor.h"

namespace ballast::plan::executor_test {

/// A small model of device streams and disks: one thread per queued lane runs the enqueued
/// operations, a stream in order, a disk the latest request first. If `collectives` are streamed,
/// the lanes gather and reduce of a device have a stream together, and streams wait for each other.
class Streams {
 public:
  explicit Streams(Handler work, std::uint32_t devices = 1, bool collectives = false)
      : work_(std::move(work)),
        collectives_(collectives),
        streams_(lane_count(devices)),
        started_(lane_count(devices)),
        followed_(lane_count(devices)) {
    for (std::size_t number = 0; number < streams_.size(); ++number) {
      const Lane lane = lane_at(number).lane;
      if (!is_on_stream(lane) && !is_queued(lane)) continue;
      streams_[number].in_order = is_on_stream(lane);
      streams_[number].thread = std::thread([this, number] { run(streams_[number]); });
    }
  }
  ~Streams() {
    {
      const std::scoped_lock lock(mutex_);
      ending_ = true;
    }
    changed_.notify_all();
    for (Stream& stream : streams_) {
      if (stream.thread.joinable()) stream.thread.join();
    }
  }
  Streams(const Streams&) = delete;
  Streams& operator=(const Streams&) = delete;

  /// The executor's handler: performs an operation, or enqueues it if the lane is queued.
  void start(const Operation& operation, std::uint64_t run) {
    if (!is_on_stream(operation.lane) && !is_queued(operation.lane)) return work_(operation, run);
    Stream& stream = of(operation);
    const Key key(&operation, run);
    {
      const std::scoped_lock lock(mutex_);
      stream.items.push_back({key, std::exchange(followed_[lane_number(operation)], {})});
      started_[lane_number(operation)].push_back(key);
      most_ = std::max(most_, stream.items.size());
    }
    changed_.notify_all();
  }
  /// Function for ExecutorOptions::finish.
  void finish(const Operation& operation, std::uint64_t run) {
    std::unique_lock lock(mutex_);
    const Key key(&operation, run);
    changed_.wait(lock, [&] { return done_.count(key) > 0; });
    std::deque<Key>& started = started_[lane_number(operation)];
    const Key expected = started.front();
    EXPECT_EQ(key, expected) << "finished out of turn";
    started.pop_front();
  }
  /// Function for ExecutorOptions::follow.
  void follow(const Operation& next, const Operation& before, std::uint64_t run) {
    const std::scoped_lock lock(mutex_);
    followed_[lane_number(next)].emplace_back(&before, run);
  }
  ExecutorOptions options(ExecutorOptions others) {
    others.finish = [this](const Operation& operation, std::uint64_t run) {
      finish(operation, run);
    };
    if (!collectives_) return others;
    others.follow = [this](const Operation& next, const Operation& before, std::uint64_t run) {
      follow(next, before, run);
    };
    return others;
  }
  /// The largest number of operations in a stream at a time.
  [[nodiscard]] std::size_t most() const {
    const std::scoped_lock lock(mutex_);
    return most_;
  }

 private:
  using Key = std::pair<const Operation*, std::uint64_t>;
  struct Item {
    Key key;
    std::vector<Key> followed;
  };
  struct Stream {
    std::deque<Item> items;  ///< operations that are not done
    bool in_order = true;
    std::thread thread;
  };

  [[nodiscard]] bool is_on_stream(Lane lane) const {
    return mode_of(lane) == Mode::streamed || (collectives_ && is_collective_lane(lane));
  }
  Stream& of(const Operation& operation) {
    const bool shared = operation.lane == Lane::reduce;
    return streams_[lane_number(shared ? Lane::gather : operation.lane, operation.device)];
  }
  [[nodiscard]] bool may_run(const Stream& stream) const {
    if (stream.items.empty()) return false;
    const std::vector<Key>& followed = stream.items.front().followed;
    return std::all_of(followed.begin(), followed.end(),
                       [this](const Key& key) { return done_.count(key) > 0; });
  }
  void run(Stream& stream) {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return (ending_ && stream.items.empty()) || may_run(stream); });
      if (stream.items.empty()) return;
      const Key key = stream.in_order ? stream.items.front().key : stream.items.back().key;
      lock.unlock();
      work_(*key.first, key.second);
      lock.lock();
      stream.items.erase(std::find_if(stream.items.begin(), stream.items.end(),
                                      [&](const Item& item) { return item.key == key; }));
      done_.insert(key);
      changed_.notify_all();
    }
  }

  Handler work_;
  bool collectives_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Stream> streams_;             ///< by lane_number()
  std::vector<std::deque<Key>> started_;    ///< by lane_number(): not finished
  std::vector<std::vector<Key>> followed_;  ///< by lane_number(): those of the next operation
  std::set<Key> done_;
  std::size_t most_ = 0;
  bool ending_ = false;
};

/// Operations of the given lanes, each after the previous one.
inline Plan chain(std::initializer_list<Lane> lanes) {
  Plan plan;
  for (const Lane lane : lanes) {
    const auto id = static_cast<OpId>(plan.operations.size());
    Operation operation;
    operation.lane = lane;
    if (id > 0) operation.after = {id - 1};
    plan.operations.push_back(operation);
  }
  return plan;
}

}  // namespace ballast::plan::executor_test
