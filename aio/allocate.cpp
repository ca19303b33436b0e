#include "aio/allocate.h"

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <memory>
#include <new>

#include <fcntl.h>
#include <unistd.h>

namespace ballast::aio {

// Does not use posix_fallocate: where the file system has no fallocate, glibc writes single bytes,
// which O_DIRECT refuses.
int allocate_blocks(int descriptor, Bytes size, Bytes alignment, Bytes begin) {
  if (size == 0) return 0;
  while (fallocate(descriptor, 0, 0, static_cast<off_t>(size)) != 0) {
    if (errno == EOPNOTSUPP) return write_zeros(descriptor, size, alignment, begin);
    if (errno != EINTR) return errno;
  }
  return 0;
}

int write_zeros(int descriptor, Bytes size, Bytes alignment, Bytes begin) {
  const Bytes end = round_up(size, alignment);
  const Bytes chunk = round_up(std::min(end, 1 * kMiB), alignment);
  const auto granule = static_cast<std::align_val_t>(std::max<Bytes>(alignment, kPage));
  const auto release = [granule](std::byte* bytes) { operator delete[](bytes, granule); };
  const std::unique_ptr<std::byte[], decltype(release)> zeros(
      static_cast<std::byte*>(operator new[](chunk, granule)), release);
  std::memset(zeros.get(), 0, chunk);
  for (Bytes offset = begin; offset < end;) {
    const ssize_t written =
        pwrite(descriptor, zeros.get(), std::min(chunk, end - offset), static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return errno;
    const Bytes progress = static_cast<Bytes>(written) / alignment * alignment;
    if (progress == 0) return EIO;
    offset += progress;
  }
  while (ftruncate(descriptor, static_cast<off_t>(size)) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

}  // namespace ballast::aio
