#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <type_traits>

#include "tests/support/emulation/settings.h"

namespace ballast::test::emulation {

/// Extents and indices as in CUDA.
struct Dim3 {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;
  constexpr Dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1)  // NOLINT: as CUDA's
      : x(x_), y(y_), z(z_) {}
};

/// The order in which the threads of a block run between barriers, and in which the blocks run. A
/// warp runs to the next barrier of the block before the others start, beginning with the first
/// warp or the last one. With `shuffled`, any warp may run to its next exchange, as
/// Seeds::timing decides. Correct kernels give the same bits in each order: data that passes
/// between threads without a barrier, or between blocks, changes the result.
enum class Order { forward, backward, shuffled };

/// Sets the order of all later grids in this process.
void set_order(Order order);

/// Runs `body` once for each thread of the grid, one block after the other. The threads of a block
/// are fibers of the calling thread, so that they can wait for each other. Ends the process with a
/// message that names `kernel` (an address) if they deadlock or do what a GPU does not define.
void run_grid(const void* kernel, Dim3 blocks, unsigned threads, std::size_t shared_bytes,
              const std::function<void()>& body);

/// Indices of the running CUDA thread.
struct Place {
  Dim3 thread;
  Dim3 block;
  Dim3 threads;
  Dim3 blocks;
};
/// The place of the CUDA thread that this host thread runs. Kernels read it so often that a call
/// would be a tenth of their time.
inline constinit thread_local Place place_of_thread;
inline const Place& here() {
  return place_of_thread;
}
void* dynamic_memory();

/// Ends the process with a message about the running kernel and thread.
[[noreturn]] void fail(const std::string& what);
/// Ends the process if the emulated GPU has a lower compute capability (times ten).
void need_capability(unsigned least, const char* what);

/// Waits for all threads of the block that have not ended.
void meet_block();
/// Returns whether any thread of the block voted. All threads of the block take part.
bool any_in_block(bool vote);
/// Waits for the lanes of `mask`, which then see what the others have written to memory.
void meet_warp(std::uint32_t mask);
/// Waits for the lanes of `mask` in this warp. Each passes `bytes` (at most kMaxExchanged) and can
/// then read the bytes of any other lane with given_by(), until its next exchange. Writes to memory
/// are not ordered by it, as on a GPU.
inline constexpr std::size_t kMaxExchanged = 64;
void exchange_all(std::uint32_t mask, const void* mine, std::size_t bytes);
const void* given_by(unsigned lane);

template <class T>
T shuffle(std::uint32_t mask, T value, unsigned from) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= kMaxExchanged);
  exchange_all(mask, &value, sizeof value);
  T got;
  __builtin_memcpy(&got, given_by(from), sizeof got);
  return got;
}

/// Copies that were started but not waited for, per thread: see tensor_core.h. They happen when
/// they are awaited or, with Seeds::timing, at any time before.
void start_copy(void* to, const void* from, bool there);
void end_copies();
void await_copies(std::size_t pending);

/// This thread's parts of products of its warpgroup, which happen in order, when a wait names their
/// group or, with Seeds::timing, at any time before.
void start_product(std::function<void()> product);
void end_products();
void await_products(std::size_t pending);
/// Shows this thread's writes to shared memory to later products.
void show_to_products();

/// Sees what the threads of a grid do.
class Watcher {
 public:
  Watcher() = default;
  Watcher(const Watcher&) = delete;
  Watcher& operator=(const Watcher&) = delete;
  virtual ~Watcher() = default;

  virtual void begin_grid() = 0;
  virtual void end_grid() = 0;
  /// The block's dynamic shared memory.
  virtual void begin_block(const void* shared, std::size_t bytes) = 0;
  /// A thread of the block, with its stack, continues.
  virtual void enter(unsigned thread, const void* stack, std::size_t bytes) = 0;
  /// All threads have met.
  virtual void met_block() = 0;
  /// The lanes of `mask` in the warp of `thread` have met and see each other's writes.
  virtual void met_warp(unsigned thread, std::uint32_t mask) = 0;
  virtual void start_copy(const void* to, const void* from, bool there) = 0;
  virtual void end_copy(const void* to, const void* from, bool there) = 0;
  /// Returns the time of a product's start, with which its reads are checked.
  virtual std::uint64_t start_product() = 0;
  virtual void begin_reads_of_product(std::uint64_t started) = 0;
  virtual void end_reads_of_product() = 0;
  virtual void show_to_products() = 0;
  virtual void change_atomically(const void* start, std::size_t bytes) = 0;
};
/// Sets the watcher of all later grids of this process; null: none.
void set_watcher(Watcher* watcher);
/// Whether there is a watcher. One order of the threads is enough for it.
bool is_watched();
/// An atomic function of the running thread changes memory.
void change_atomically(const void* start, std::size_t bytes);

}  // namespace ballast::test::emulation
