#include <fmt/format.h>

#include "ballast/aio/queue.h"
#include "ballast/core/error.h"

namespace ballast::aio {

void Completion::check(std::string_view stage) const {
  if (ok()) return;
  const std::string what =
      fmt::format("{}: {} {} offset={} length={}", stage,
                  direction == Direction::read ? "read" : "write", file, offset, length);
  if (error_number != 0) throw Error(ErrorCategory::io, what, error_number);
  throw Error(ErrorCategory::io, fmt::format("{}: only {} bytes transferred", what, transferred));
}

}  // namespace ballast::aio
