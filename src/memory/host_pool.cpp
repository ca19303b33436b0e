#include "ballast/memory/host_pool.h"

#include <cerrno>

#include <fmt/format.h>
#include <sys/mman.h>

#include "ballast/core/error.h"

namespace ballast::memory {

HostPool::HostPool(Bytes bytes) : capacity_(round_up(bytes, kPage)) {
  if (capacity_ == 0) return;
  void* mapping = mmap(nullptr, capacity_, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) {
    throw Error(ErrorCategory::memory,
                fmt::format("mapping {} of host memory", format_bytes(capacity_)), errno);
  }
  base_ = static_cast<std::byte*>(mapping);
  // Huge pages are a wish: the kernel may have none, and nothing but speed depends on it.
  static_cast<void>(madvise(base_, capacity_, MADV_HUGEPAGE));
}

HostPool::~HostPool() {
  if (base_ != nullptr) munmap(base_, capacity_);
}

HostBytes HostPool::allocate(Bytes bytes, std::string_view what) {
  const Bytes size = round_up(bytes, kPage);
  if (size > capacity_ - allocated_) {
    throw Error(ErrorCategory::memory,
                fmt::format("host memory: {} needs {}, but {} of {} are left; raise "
                            "ballast.host_bytes",
                            what, format_bytes(size), format_bytes(capacity_ - allocated_),
                            format_bytes(capacity_)));
  }
  std::byte* start = base_ + allocated_;
  allocated_ += size;
  return {start, bytes};
}

}  // namespace ballast::memory
