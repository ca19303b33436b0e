#include "ballast/memory/host_pool.h"

#include <fmt/format.h>

#include "ballast/core/error.h"

namespace ballast::memory {

HostPool::HostPool(Bytes bytes) : mapping_(bytes, "host memory (ballast.host_bytes)") {}

HostBytes HostPool::allocate(Bytes bytes, std::string_view what) {
  const Bytes size = round_up(bytes, kPage);
  if (size > capacity() - allocated_) {
    throw Error(ErrorCategory::memory,
                fmt::format("host memory: {} needs {}, but {} of {} are left; raise "
                            "ballast.host_bytes",
                            what, format_bytes(size), format_bytes(capacity() - allocated_),
                            format_bytes(capacity())));
  }
  const HostBytes piece = mapping_.bytes().subspan(allocated_, bytes);
  allocated_ += size;
  return piece;
}

}  // namespace ballast::memory
