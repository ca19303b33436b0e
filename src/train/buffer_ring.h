#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <string_view>

#include "ballast/core/mapping.h"
#include "ballast/core/view.h"

namespace ballast::train {

/// Numbered buffers that pass from threads that fill them to threads that empty them, each in any
/// order. The memory begins at a page and lies on huge pages where the kernel provides them, so
/// direct I/O moves it in few requests. An error of one thread reaches all others.
class BufferRing {
 public:
  static constexpr std::size_t kBuffers = 8;
  /// Threads that read or write at a time. With one, the disk idles between its requests.
  static constexpr std::size_t kThreads = 4;

  struct Empty {
    std::uint64_t number = 0;
    HostBytes memory;
  };
  struct Filled {
    std::uint64_t number = 0;
    ConstHostBytes bytes;
  };

  /// Throws Error(memory) naming `what`.
  BufferRing(Bytes each, std::string_view what);

  /// The next buffer to fill, numbered from 0. Waits until it is empty; none after close().
  std::optional<Empty> take();
  void give(const Filled& filled);

  /// The next filled buffer. Waits for it; none if close() came before it.
  std::optional<Filled> next();
  void release(std::uint64_t number);

  /// Ends both sides; with an error, members throw it from now on. Only the first one is kept.
  void close(std::exception_ptr error = nullptr);
  /// Throws the error of close(), if there is one.
  void check();

 private:
  enum class State : std::uint8_t { empty, taken, filled, released };
  State& state(std::uint64_t number) { return states_[number % kBuffers]; }

  Bytes each_;
  Mapping memory_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::array<State, kBuffers> states_ = {};
  std::array<ConstHostBytes, kBuffers> filled_ = {};
  std::uint64_t taken_ = 0;  ///< numbers that take() gave out
  std::uint64_t asked_ = 0;  ///< numbers that calls of next() wait for or got
  std::uint64_t freed_ = 0;  ///< all buffers before this number were released
  bool closed_ = false;
  std::exception_ptr error_;
};

}  // namespace ballast::train
