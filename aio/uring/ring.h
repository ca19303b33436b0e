#pragma once

#include <string>

#include <liburing.h>

namespace ballast::aio {

/// An io_uring instance, set up with the best flags that the kernel has. To be made, used and
/// destroyed by one thread (IORING_SETUP_SINGLE_ISSUER).
class Ring {
 public:
  /// Room for `entries` submissions. Throws Error(io) with the reason when the kernel refuses or
  /// lacks an operation that transfers need.
  explicit Ring(unsigned entries);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  [[nodiscard]] io_uring* get() { return &ring_; }
  /// "kernel 6.1, SINGLE_ISSUER DEFER_TASKRUN COOP_TASKRUN".
  [[nodiscard]] std::string description() const;

 private:
  io_uring ring_{};
  std::string flags_;
};

}  // namespace ballast::aio
