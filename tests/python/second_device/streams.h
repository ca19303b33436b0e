#pragma once

#include <functional>
#include <memory>

namespace second_device {

// Streams of the emulated device. Each has a thread that runs its tasks in order, later than the
// host enqueues them. Only marks order tasks of different streams.

using StreamId = int;
constexpr StreamId kStreams = 64;  ///< 0 is the default stream

enum class Kind { kernel, copy, housekeeping };

/// A point in a stream, which the stream's thread reaches later.
struct Mark;
using MarkRef = std::shared_ptr<Mark>;

/// Appends a task. What it throws is thrown by the next call that waits. `task` must not need the
/// GIL.
void enqueue(StreamId stream, Kind kind, std::function<void()> task);

MarkRef record(StreamId stream);
/// Makes later tasks of `stream` wait for the mark.
void block(StreamId stream, const MarkRef& mark);
bool reached(const MarkRef& mark);
bool idle(StreamId stream);
/// Seconds from one reached mark to another.
double seconds_between(const MarkRef& first, const MarkRef& last);

// These wait on the calling thread, and throw what a task has thrown since the last call.
void synchronize(const MarkRef& mark);
void synchronize(StreamId stream);
void synchronize_all();

/// Seconds that each kernel and each copy takes at least.
void set_delays(double kernel, double copy);

StreamId current_stream();
StreamId exchange_stream(StreamId stream);
StreamId new_stream();

}  // namespace second_device
