#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <type_traits>

namespace ballast::test::emulation {

/// Extents, and places in them, as CUDA has them.
struct Dim3 {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;
  constexpr Dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1)  // NOLINT: as CUDA's
      : x(x_), y(y_), z(z_) {}
};

/// In which order the threads of a block get from one barrier to the next, and in which the blocks
/// run: a warp goes on without the others to the next barrier of the block, the first one or the
/// last one first; shuffled, any warp may go on to its next exchange. Right kernels give the same
/// bits in each: what one thread leaves for another without a barrier between them shows, and so
/// does what one block leaves for another.
enum class Order { forward, backward, shuffled };

/// Order of the grids that this process runs from now on.
void set_order(Order order);

/// Runs `body` once for each thread of the grid, one block after the other; the threads of a block
/// are fibers of the calling thread, so that they can wait for each other. Ends the process with a
/// message when they wait for each other for ever.
void run_grid(Dim3 blocks, unsigned threads, std::size_t shared_bytes,
              const std::function<void()>& body);

/// Of the CUDA thread that runs.
struct Place {
  Dim3 thread;
  Dim3 block;
  Dim3 threads;
  Dim3 blocks;
};
const Place& here();
void* dynamic_memory();

/// Waits for all threads of the block that have not ended.
void meet_block();
/// Waits for the lanes of `mask` in this warp; each gives `bytes` (at most kMostExchanged) and
/// afterwards reads with given_by() what any of them gave, until its next exchange.
inline constexpr std::size_t kMostExchanged = 64;
void exchange_all(std::uint32_t mask, const void* mine, std::size_t bytes);
const void* given_by(unsigned lane);

template <class T>
T shuffle(std::uint32_t mask, T value, unsigned from) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= kMostExchanged);
  exchange_all(mask, &value, sizeof value);
  T got;
  __builtin_memcpy(&got, given_by(from), sizeof got);
  return got;
}

/// Copies that were started and not waited for, per thread: see tensor_core.h.
void start_copy(void* to, const void* from, bool there);
void end_copies();
void await_copies(std::size_t pending);

}  // namespace ballast::test::emulation
