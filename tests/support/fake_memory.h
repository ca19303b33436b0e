#pragma once

#include <cstddef>

namespace ballast::test {

/// The memory of the fake GPU. With a seed (FakeCuda::seed) each allocation has pages without
/// access around it, is filled with 0xff (NaN in all floating-point types), and is accessible only
/// while the GPU works: a host thread that touches it ends the process with a message.
class FakeMemory {
 public:
  /// Returns memory aligned to 256 bytes, or null if the GPU has no room for it.
  static void* take(std::size_t size);
  /// Checks the bytes around the allocation, and frees it.
  static void give_back(void* memory);
  /// Zeroes memory as cudaMemset does. Pages of new allocations are not touched.
  static void zero(void* memory, std::size_t size);

  enum class Where { outside, inside, across };
  /// How a range overlaps with the GPU's allocations: inside one, outside all, or across an end.
  static Where where(const void* start, std::size_t size);

  /// The GPU begins or ends an item of work. `zeroed`: an allocation that the work zeroes as a
  /// whole, or null.
  static void open(const void* zeroed = nullptr);
  static void close();

  /// Bytes allocated.
  static std::size_t taken();
};

}  // namespace ballast::test
