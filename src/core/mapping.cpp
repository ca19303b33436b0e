#include "ballast/core/mapping.h"

#include <cerrno>
#include <string>
#include <utility>

#include <sys/mman.h>

#include "ballast/core/error.h"

namespace ballast {

Mapping::Mapping(Bytes bytes, std::string_view what) {
  if (bytes == 0) return;
  const Bytes size = round_up(bytes, kPage);
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    throw Error(ErrorCategory::memory, std::string(what) + ": cannot map " + format_bytes(size),
                errno);
  }
  // Huge pages are optional; they affect only speed.
  static_cast<void>(madvise(memory, size, MADV_HUGEPAGE));
  bytes_ = {static_cast<std::byte*>(memory), size};
}

Mapping::~Mapping() {
  if (!bytes_.empty()) munmap(bytes_.data(), bytes_.size());
}

Mapping::Mapping(Mapping&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  return *this;
}

}  // namespace ballast
