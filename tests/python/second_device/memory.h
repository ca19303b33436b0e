#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "streams.h"

namespace second_device {

// Memory of the emulated device. It is mapped twice: tensors have addresses of a mapping that
// nobody may access, so a CPU operation on them faults, and kernels have another mapping. Memory is
// full of 0xFF bytes (NaNs, or -1) before its first use and after its last.

struct MemoryStats {
  std::size_t allocated = 0;  ///< bytes, in multiples of 512
  std::size_t peak = 0;
  std::size_t allocations = 0;
  std::size_t budget = 0;
};

/// Blocks of device memory that a task uses, to find memory that was freed before it ran.
using BlockSerial = std::uint64_t;

/// Returns a device address; null for 0 bytes. Throws c10::OutOfMemoryError over the budget.
void* allocate(std::size_t bytes, StreamId stream);
/// Frees a block in the order of its stream, and of streams that were recorded for it.
void release(void* address);
void record_use(const void* address, StreamId stream);
bool is_device_address(const void* address);

/// The address for kernels.
char* kernel_address(const void* address);
/// Returns the block that has all of these bytes. Throws c10::Error if there is none.
BlockSerial block_of(const void* address, std::size_t bytes);
/// Throws std::runtime_error if the block's memory was freed in the order of its streams.
void expect_alive(BlockSerial serial);

void set_budget(std::size_t bytes);
MemoryStats memory_stats();
void reset_peak();

/// Pinned host memory. Its last owner, which may be a copy under way, poisons and frees it.
void* allocate_pinned(std::size_t bytes);
void release_pinned(void* address);
/// Treats other memory as pinned until unregister_pinned().
void register_pinned(void* address, std::size_t bytes);
void unregister_pinned(void* address);
/// Returns an owner of the pinned memory at this address, or null if it is not pinned.
std::shared_ptr<void> pinned_owner(const void* address);

}  // namespace second_device
