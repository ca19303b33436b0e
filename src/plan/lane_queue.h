#pragma once

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "ballast/plan/plan.h"

#include "src/plan/ordering.h"

// The executor's records of submitted plans and of its lanes. All are protected by its lock.
namespace ballast::plan {

using Seam = std::vector<std::vector<OpId>>;

enum class Progress : char { waiting, enqueued, finished };

/// One submitted plan.
struct Submission {
  const Plan* plan = nullptr;
  std::uint64_t number = 0;
  std::vector<Progress> progress;
  std::vector<OpId> awaited;  ///< operations for which callers wait
  std::size_t remaining = 0;
  std::shared_ptr<Submission>
      previous;                  ///< reset after it has finished and a next one was submitted
  const Seam* seam = nullptr;    ///< between the previous submission and this one
  const Turns* turns = nullptr;  ///< nullptr: no operation takes a turn
  std::array<std::size_t, kMaxDevices> ended_turns{};  ///< by device
  /// ExecutorOptions::follow is set, so that streams can wait for each other.
  bool streams_wait = false;
  std::vector<double> ends;  ///< by operation, if streams can wait: when it finished

  [[nodiscard]] bool finished() const { return remaining == 0; }

  /// Returns whether a caller may wait for the end of operation `id`, which has just finished.
  [[nodiscard]] bool is_awaited(OpId id) const {
    return finished() || std::find(awaited.begin(), awaited.end(), id) != awaited.end();
  }

  /// Returns whether `next`, if started now, runs after operation `id` of this submission.
  [[nodiscard]] bool precedes(OpId id, const Operation& next) const {
    if (progress[id] != Progress::enqueued) return progress[id] == Progress::finished;
    const Operation& before = plan->operations[id];
    return ordered_by_stream(before, next) || (streams_wait && stream_can_wait(next, before));
  }

  /// Returns whether the stream of `next` must wait for operation `id`.
  [[nodiscard]] bool is_followed(OpId id, const Operation& next) const {
    return progress[id] == Progress::enqueued && !ordered_by_stream(plan->operations[id], next);
  }

  [[nodiscard]] bool takes_turn(OpId id) const { return turns != nullptr && turns->taken[id]; }
  [[nodiscard]] bool turns_ended(std::uint8_t device) const {
    return turns == nullptr || ended_turns[device] == turns->order[device].size();
  }

  [[nodiscard]] bool ready(OpId id) const {
    const Operation& operation = plan->operations[id];
    if (takes_turn(id)) {
      const std::uint8_t device = operation.device;
      if (turns->order[device][ended_turns[device]] != id) return false;
      if (previous != nullptr && !previous->turns_ended(device)) return false;
    }
    for (const OpId before : operation.after) {
      if (!precedes(before, operation)) return false;
    }
    if (previous == nullptr) return true;
    for (const OpId before : (*seam)[id]) {
      if (!previous->precedes(before, operation)) return false;
    }
    return true;
  }
};

/// An operation of a submitted plan.
struct SubmittedOperation {
  std::shared_ptr<Submission> submission;
  OpId id = kNoOp;

  [[nodiscard]] const Operation& operation() const { return submission->plan->operations[id]; }
  [[nodiscard]] bool is(Progress progress) const { return submission->progress[id] == progress; }
};

/// An operation in a lane.
struct LaneItem {
  SubmittedOperation submitted;
  double begun = 0.0;
  std::vector<SubmittedOperation> followed =
      {};  ///< enqueued operations for which its stream waits

  [[nodiscard]] const Operation& operation() const { return submitted.operation(); }
  [[nodiscard]] std::uint64_t submission() const { return submitted.submission->number; }

  /// Adds the operations on other streams that are enqueued and that this one needs.
  void follow_needed() {
    const Submission& own = *submitted.submission;
    const auto add = [this](const std::shared_ptr<Submission>& of, std::span<const OpId> needed) {
      for (const OpId id : needed) {
        if (of->is_followed(id, operation())) followed.push_back({of, id});
      }
    };
    add(submitted.submission, operation().after);
    if (own.previous != nullptr) add(own.previous, (*own.seam)[submitted.id]);
  }
  /// Returns whether the device can have begun the operation.
  [[nodiscard]] bool followed_finished() const {
    return std::all_of(followed.begin(), followed.end(),
                       [](const SubmittedOperation& each) { return each.is(Progress::finished); });
  }
  /// Returns when the followed operations, which have finished, did so; 0 if there are none.
  [[nodiscard]] double end_of_followed() const {
    double end = 0.0;
    for (const SubmittedOperation& each : followed)
      end = std::max(end, each.submission->ends[each.id]);
    return end;
  }
};

/// The queues of a lane.
struct LaneQueue {
  std::deque<LaneItem> waiting;
  std::deque<LaneItem> enqueued;         ///< and not finished
  double free_since = 0.0;               ///< end of the last finished operation
  std::optional<double> starting_since;  ///< set while an operation is being started
  std::optional<double> waiting_since;   ///< set while the next operation waits for its inputs
  std::size_t most = 0;                  ///< maximum number enqueued
  std::condition_variable may_start;
  std::condition_variable may_finish;

  [[nodiscard]] bool can_start() const {
    if (waiting.empty() || enqueued.size() >= most) return false;
    const SubmittedOperation& next = waiting.front().submitted;
    return next.submission->ready(next.id);
  }
  /// Returns whether an operation is enqueued, and those that it follows have finished. So an
  /// operation finishes after all that it needs, and its time does not include theirs.
  [[nodiscard]] bool can_finish() const {
    return !enqueued.empty() && enqueued.front().followed_finished();
  }
  /// Returns whether the stream waits for another one.
  [[nodiscard]] bool stream_waits() const { return !enqueued.empty() && !can_finish(); }

  /// Returns the seconds that the current operation has run until `time`; 0 if there is none.
  [[nodiscard]] double busy_until(double time) const {
    if (stream_waits()) return 0.0;
    std::optional<double> begun = starting_since;
    if (!enqueued.empty()) begun = enqueued.front().begun;
    return begun ? std::max(0.0, time - std::max(*begun, free_since)) : 0.0;
  }

  /// Returns the seconds that the next operation has waited until `time`. Enqueued operations keep
  /// a lane busy.
  [[nodiscard]] double stalled_until(double time) const {
    if (!waiting_since || !enqueued.empty()) return 0.0;
    return std::max(0.0, time - std::max(*waiting_since, free_since));
  }
  /// Returns the seconds that the stream has waited for another one until `time`.
  [[nodiscard]] double stream_waits_until(double time) const {
    if (!stream_waits()) return 0.0;
    return std::max(0.0, time - std::max(enqueued.front().begun, free_since));
  }
};

}  // namespace ballast::plan
