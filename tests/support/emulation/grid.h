#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <type_traits>

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
/// warp or the last one. With `shuffled`, any warp may run to its next exchange. Correct kernels
/// give the same bits in each order: data that passes between threads without a barrier, or between
/// blocks, changes the result.
enum class Order { forward, backward, shuffled };

/// Sets the order of all later grids in this process.
void set_order(Order order);

/// Runs `body` once for each thread of the grid, one block after the other. The threads of a block
/// are fibers of the calling thread, so that they can wait for each other. Ends the process with a
/// message if they deadlock.
void run_grid(Dim3 blocks, unsigned threads, std::size_t shared_bytes,
              const std::function<void()>& body);

/// Indices of the running CUDA thread.
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
/// Waits for the lanes of `mask` in this warp. Each passes `bytes` (at most kMostExchanged) and can
/// then read the bytes of any other lane with given_by(), until its next exchange.
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

/// Copies that were started but not waited for, per thread: see tensor_core.h.
void start_copy(void* to, const void* from, bool there);
void end_copies();
void await_copies(std::size_t pending);

/// Whether the emulated GPU multiplies matrices by warpgroups (warpgroup.h); at first it does not.
bool has_warpgroup_products();
void set_warpgroup_products(bool has);
/// This thread's parts of products, which run when a wait names their group, in order.
void start_product(std::function<void()> product);
void end_products();
void await_products(std::size_t pending);

}  // namespace ballast::test::emulation
