#include "src/device/bump.h"

#include <fmt/format.h>

#include "ballast/core/error.h"

namespace ballast::device {

DeviceBytes Bump::take(Bytes bytes, std::string_view what) {
  const std::scoped_lock lock(mutex_);
  const Bytes size = round_up(bytes, kPage);
  if (size > budget() - taken_) {
    throw Error(ErrorCategory::memory,
                fmt::format("device memory: {} needs {}, but {} of the budget of {} are left; "
                            "raise ballast.device_bytes",
                            what, format_bytes(size), format_bytes(budget() - taken_),
                            format_bytes(budget())));
  }
  const DeviceBytes made = memory_.subview(taken_, bytes);
  taken_ += size;
  return made;
}

Bytes Bump::taken() const {
  const std::scoped_lock lock(mutex_);
  return taken_;
}

}  // namespace ballast::device
