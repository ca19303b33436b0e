#pragma once

#include <cstddef>
#include <memory>

#include "ballast/core/units.h"

namespace ballast::device {

class Device;

/// Which way copies go: to the device, from it, or one after another each way, both ways at once.
enum class CopyWay { up, down, both };

/// The plainest copies that the machine has between a device's memory and the host's, each of one
/// size: what the device's own copies are measured against.
class PlainCopies {
 public:
  virtual ~PlainCopies() = default;
  PlainCopies() = default;
  PlainCopies(const PlainCopies&) = delete;
  PlainCopies& operator=(const PlainCopies&) = delete;

  /// Makes `count` copies, or so many each way, and waits for them. Throws Error(device).
  virtual void run(CopyWay way, std::size_t count) = 0;
};

/// Copies of `bytes`. Host device: memcpy, each way by a thread. CUDA device: cudaMemcpyAsync to
/// and from memory of cudaMallocHost. They have memory of their own, beside the device's budget:
/// twice `bytes` on either side. `device` must outlive them. Throws Error(memory) or Error(device).
std::unique_ptr<PlainCopies> make_plain_copies(Device& device, Bytes bytes);

}  // namespace ballast::device
