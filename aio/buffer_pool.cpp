#include "ballast/aio/buffer_pool.h"

#include <cerrno>
#include <cstring>
#include <string>

#include <sys/mman.h>

#include "ballast/core/error.h"

namespace ballast::aio {
namespace {

// Linux 5.14; Debian 12's headers have it, glibc's sys/mman.h too.
void make_resident(HostBytes memory, std::string_view what) {
  if (memory.empty() || madvise(memory.data(), memory.size(), MADV_POPULATE_WRITE) == 0) return;
  if (errno == EINVAL) {
    std::memset(memory.data(), 0, memory.size());
    return;
  }
  throw Error(ErrorCategory::memory,
              std::string(what) + ": " + format_bytes(memory.size()) + " of memory", errno);
}

}  // namespace

BufferPool::BufferPool(std::size_t count, Bytes bytes, std::string_view what)
    : count_(count), bytes_(round_up(bytes, kPage)), mapping_(count_ * bytes_, what) {
  make_resident(mapping_.bytes(), what);
  for (std::size_t i = count; i > 0; --i) free_.push_back(i - 1);
}

Lease BufferPool::acquire() {
  std::unique_lock lock(mutex_);
  returned_.wait(lock, [&] { return !free_.empty(); });
  return lend();
}

std::optional<Lease> BufferPool::try_acquire() {
  const std::scoped_lock lock(mutex_);
  if (free_.empty()) return std::nullopt;
  return lend();
}

std::size_t BufferPool::available() const {
  const std::scoped_lock lock(mutex_);
  return free_.size();
}

Lease BufferPool::lend() {
  const std::size_t index = free_.back();
  free_.pop_back();
  return Lease(mapping_.bytes().subspan(index * bytes_, bytes_), [this, index] {
    const std::scoped_lock lock(mutex_);
    free_.push_back(index);
    returned_.notify_one();
  });
}

}  // namespace ballast::aio
