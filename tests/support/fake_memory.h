#pragma once

#include <cstddef>
#include <cstdint>

namespace ballast::test {

/// A set of GPUs, one bit each.
using GpuSet = std::uint32_t;

/// The memory of the fake GPUs. With a seed (FakeCuda::seed) each allocation has pages without
/// access around it, is filled with 0xff (NaN in all floating-point types), and is accessible only
/// while its GPU works: a host thread that touches it, or the work of another GPU, ends the process
/// with a message.
class FakeMemory {
 public:
  /// Returns memory of GPU `device` aligned to 256 bytes, or null if there is no room for it.
  static void* take(std::size_t size, int device);
  /// Checks the bytes around the allocation, and frees it.
  static void give_back(void* memory);
  /// Zeroes memory as cudaMemset does. Pages of new allocations are not touched.
  static void zero(void* memory, std::size_t size);

  enum class Where { outside, inside, across };
  /// How a range overlaps with the GPU's allocations: inside one, outside all, or across an end.
  static Where where(const void* start, std::size_t size);

  /// An item of work of `gpus` begins or ends. `zeroed`: an allocation that the work zeroes as a
  /// whole, or null.
  static void open(GpuSet gpus, const void* zeroed = nullptr);
  static void close(GpuSet gpus);

  /// Returns whether an allocation of GPU `device` contains `start`.
  static bool is_on(int device, const void* start);

  /// Bytes allocated.
  static std::size_t taken();
};

}  // namespace ballast::test
