#include "src/device/device_memory.h"

#include <fmt/format.h>

#include "ballast/core/error.h"

namespace ballast::device {

DeviceBytes DeviceMemory::take(Bytes bytes, std::string_view what) {
  const std::scoped_lock lock(mutex_);
  const Bytes size = round_up(bytes, kPage);
  const Bytes left = budget_ - bump_.used();
  if (size > left) {
    throw Error(ErrorCategory::memory,
                fmt::format("device memory: {} needs {}, but {} of the budget of {} are left; "
                            "raise ballast.device_bytes",
                            what, format_bytes(size), format_bytes(left), format_bytes(budget_)));
  }
  return {bump_.take<std::byte>(size, kPage), bytes};
}

Bytes DeviceMemory::taken() const {
  const std::scoped_lock lock(mutex_);
  return bump_.used();
}

}  // namespace ballast::device
