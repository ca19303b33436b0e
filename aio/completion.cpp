#include <cerrno>

#include <fmt/format.h>

#include "ballast/aio/queue.h"
#include "ballast/core/error.h"

#include "aio/transfer.h"

namespace ballast::aio {

void Completion::check(std::string_view stage) const {
  if (ok()) return;
  const std::string what = fmt::format("{}: {}", stage, describe(direction, file, offset, length));
  const auto fail = [&](std::string_view cause) {
    throw Error(ErrorCategory::io, fmt::format("{}: {}", what, cause));
  };
  if (end_of_file) fail("the file ends inside this range; it was truncated");
  if (error_number == ETIMEDOUT) {
    fail(fmt::format("no answer from the device for {:.0f} s; check the drive (dmesg)", seconds));
  }
  if (error_number == ECANCELED) fail("cancelled");
  if (error_number != 0) throw Error(ErrorCategory::io, what, error_number);
  fail(fmt::format("only {} bytes transferred", transferred));
}

}  // namespace ballast::aio
