#pragma once

#include <string_view>

#include "ballast/core/view.h"

namespace ballast {

/// Owns private anonymous memory. Address space is reserved at once; zeroed pages, huge ones if the
/// kernel provides them, are allocated on first write.
class Mapping {
 public:
  Mapping() = default;
  /// Maps `bytes` rounded up to whole pages, aligned to kPage. Throws Error(memory) with `what`.
  Mapping(Bytes bytes, std::string_view what);
  ~Mapping();
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;

  /// The whole mapping; empty when moved from.
  [[nodiscard]] HostBytes bytes() const { return bytes_; }

 private:
  HostBytes bytes_;
};

}  // namespace ballast
