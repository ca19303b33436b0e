#pragma once

#include <functional>
#include <utility>

#include "ballast/core/view.h"

namespace ballast {

/// Exclusive use of a range of host memory for as long as the object lives. Whoever does I/O on the
/// range holds the lease until the I/O is known to be finished, so memory cannot be reused under a
/// transfer. Move-only; giving it back never throws.
class Lease {
 public:
  Lease() = default;
  /// `on_release` runs once, when the lease ends, on the thread that ends it. May be empty.
  explicit Lease(HostBytes bytes, std::function<void()> on_release = {})
      : bytes_(bytes), on_release_(std::move(on_release)) {}
  Lease(Lease&& other) noexcept
      : bytes_(std::exchange(other.bytes_, {})),
        on_release_(std::exchange(other.on_release_, nullptr)) {}
  Lease& operator=(Lease&& other) noexcept {
    if (this != &other) {
      release();
      bytes_ = std::exchange(other.bytes_, {});
      on_release_ = std::exchange(other.on_release_, nullptr);
    }
    return *this;
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  ~Lease() { release(); }

  [[nodiscard]] HostBytes bytes() const { return bytes_; }
  /// Ends the lease now.
  void release() noexcept {
    bytes_ = {};
    if (auto callback = std::exchange(on_release_, nullptr)) callback();
  }

 private:
  HostBytes bytes_;
  std::function<void()> on_release_;
};

}  // namespace ballast
