#pragma once

#include <mutex>
#include <string_view>

#include "ballast/core/bump.h"
#include "ballast/core/view.h"

namespace ballast::device {

/// Allocates a device's memory in whole pages, from start to end, without freeing. Does not own the
/// memory. Thread-safe.
class DeviceMemory {
 public:
  /// `memory`: page-aligned, a whole number of pages.
  explicit DeviceMemory(DeviceBytes memory) : budget_(memory.size()), bump_(memory.raw()) {}

  DeviceBytes take(Bytes bytes, std::string_view what);
  [[nodiscard]] Bytes budget() const { return budget_; }
  [[nodiscard]] Bytes taken() const;

 private:
  Bytes budget_;
  mutable std::mutex mutex_;
  Bump bump_;
};

}  // namespace ballast::device
