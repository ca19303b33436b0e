#pragma once

#include <string_view>

#include "ballast/core/view.h"

namespace ballast {

/// Private anonymous memory: address space at once, zeroed pages when first written, huge ones
/// where the kernel grants them. Owns the mapping.
class Mapping {
 public:
  Mapping() = default;
  /// At least `bytes`, rounded up to whole pages; the start is aligned to kPage. Throws
  /// Error(memory) naming `what`.
  Mapping(Bytes bytes, std::string_view what);
  ~Mapping();
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;

  /// All of it; empty when moved from.
  [[nodiscard]] HostBytes bytes() const { return bytes_; }

 private:
  HostBytes bytes_;
};

}  // namespace ballast
