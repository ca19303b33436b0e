#pragma once

#include <mutex>
#include <string_view>

#include "ballast/core/units.h"
#include "ballast/core/view.h"

namespace ballast::device {

/// Hands out the memory of a device once, from its beginning to its end. Owns nothing. Thread-safe.
class Bump {
 public:
  /// `memory`: page-aligned, a whole number of pages.
  explicit Bump(DeviceBytes memory) : memory_(memory) {}

  /// Device::allocate.
  DeviceBytes take(Bytes bytes, std::string_view what);
  [[nodiscard]] Bytes budget() const { return memory_.size(); }
  [[nodiscard]] Bytes taken() const;

 private:
  DeviceBytes memory_;
  mutable std::mutex mutex_;
  Bytes taken_ = 0;
};

}  // namespace ballast::device
