#pragma once

#include <cstddef>
#include <memory>

#include "ballast/core/units.h"

namespace ballast::device {

class Device;

/// Direction of copies: to the device, from it, or both at once.
enum class CopyWay { up, down, both };

/// Plain copies of one size between device and host memory: the baseline for the device's copies.
class PlainCopies {
 public:
  virtual ~PlainCopies() = default;
  PlainCopies() = default;
  PlainCopies(const PlainCopies&) = delete;
  PlainCopies& operator=(const PlainCopies&) = delete;

  /// Makes `count` copies in each direction of `way` and waits for them. Throws Error(device).
  virtual void run(CopyWay way, std::size_t count) = 0;
};

/// Makes copies of `bytes`. Host device: memcpy by one thread per direction. CUDA device:
/// cudaMemcpyAsync with memory of cudaMallocHost. They allocate 2 * `bytes` on either side, outside
/// the device budget. `device` must outlive them. Throws Error(memory) or Error(device).
std::unique_ptr<PlainCopies> make_plain_copies(Device& device, Bytes bytes);

}  // namespace ballast::device
