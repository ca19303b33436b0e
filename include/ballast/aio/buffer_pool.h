#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <optional>
#include <string_view>
#include <vector>

#include "ballast/core/lease.h"
#include "ballast/core/mapping.h"

namespace ballast::aio {

/// Equal, page-aligned buffers cut from one mapping of exact size (huge pages where the kernel
/// grants them), lent out as leases. Pass memory() to make_queue as Registration::memory, which
/// pins it. Thread-safe; outlives its leases.
class BufferPool {
 public:
  /// `count` buffers of `bytes` (rounded up to whole pages), resident from the start. `what` names
  /// the pool in messages. Throws Error(memory) when the memory is refused.
  BufferPool(std::size_t count, Bytes bytes, std::string_view what);
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  /// Waits until a buffer is free. It comes back when the lease ends.
  [[nodiscard]] Lease acquire();
  /// A buffer, if one is free now.
  [[nodiscard]] std::optional<Lease> try_acquire();

  /// All of it.
  [[nodiscard]] HostBytes memory() const { return mapping_.bytes(); }
  [[nodiscard]] std::size_t count() const { return count_; }
  [[nodiscard]] std::size_t available() const;

 private:
  Lease lend();  // with the mutex held, a buffer free

  const std::size_t count_;
  const Bytes bytes_;
  Mapping mapping_;
  mutable std::mutex mutex_;
  std::condition_variable returned_;
  std::vector<std::size_t> free_;
};

}  // namespace ballast::aio
