#pragma once

#include <span>
#include <string>
#include <vector>

#include <liburing.h>

#include "ballast/aio/queue.h"

namespace ballast::aio {

/// An io_uring instance with the best setup flags that the kernel supports. Made, used and
/// destroyed by one thread (IORING_SETUP_SINGLE_ISSUER).
class Ring {
 public:
  struct Polling {
    bool submissions = false;  ///< IORING_SETUP_SQPOLL
    bool completions = false;  ///< IORING_SETUP_IOPOLL
  };

  /// Room for `entries` submissions. Throws Error(io) with the reason when the kernel refuses or
  /// lacks an operation that transfers need.
  Ring(unsigned entries, Polling polling);
  explicit Ring(unsigned entries) : Ring(entries, Polling()) {}
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  [[nodiscard]] io_uring* get() { return &ring_; }
  /// "kernel 6.1, SINGLE_ISSUER DEFER_TASKRUN COOP_TASKRUN".
  [[nodiscard]] std::string description() const;

 private:
  void require_operations();

  io_uring ring_{};
  std::string flags_;
};

/// Files and memory registered with a ring (io_uring_register(2)), which saves looking up files and
/// pinning memory at every transfer.
class RegisteredResources {
 public:
  /// Registers files and memory; logs one line for each kind that the kernel refuses.
  RegisteredResources(Ring& ring, const Registration& registration);

  /// Number of the file in the ring's table, or -1.
  [[nodiscard]] int file(int descriptor) const;
  /// Number of the buffer that holds all of [data, data + length), or -1.
  [[nodiscard]] int buffer(const std::byte* data, std::size_t length) const;

 private:
  std::vector<int> files_;
  std::vector<HostBytes> buffers_;  ///< by address
};

}  // namespace ballast::aio
