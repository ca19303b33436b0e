#pragma once

#include <cstddef>

#include "ballast/core/units.h"

namespace ballast {

/// Allocates consecutive, aligned parts of whole cache lines from memory that it does not own.
/// Without memory it only counts bytes. It does not check for the end of the memory.
class Bump {
 public:
  /// `base`: aligned to the largest alignment that take() is called with.
  explicit Bump(std::byte* base = nullptr) : base_(base) {}

  /// Returns `count` elements, or nullptr without memory. `alignment`: bytes, at least a cache
  /// line.
  template <class T>
  T* take(std::size_t count, std::size_t alignment = kCacheLine) {
    used_ = round_up(used_, alignment);
    std::byte* const start = base_ == nullptr ? nullptr : base_ + used_;
    used_ += round_up(count * sizeof(T), kCacheLine);
    return reinterpret_cast<T*>(start);
  }
  /// Bytes from the beginning to the end of the last part.
  [[nodiscard]] Bytes used() const { return used_; }

 private:
  std::byte* base_;
  Bytes used_ = 0;
};

}  // namespace ballast
