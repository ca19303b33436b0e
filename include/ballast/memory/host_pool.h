#pragma once

#include <string_view>

#include "ballast/core/mapping.h"
#include "ballast/core/units.h"
#include "ballast/core/view.h"

namespace ballast::memory {

/// Host memory of a run: one mapping of exact size (huge pages where the kernel grants them), cut
/// into page-aligned pieces that live as long as the pool. Not thread-safe while pieces are cut.
class HostPool {
 public:
  /// Reserves address space for `bytes`; pages become resident when first written. Throws
  /// Error(memory) if the mapping is refused.
  explicit HostPool(Bytes bytes);
  HostPool(const HostPool&) = delete;
  HostPool& operator=(const HostPool&) = delete;

  /// Returns the next piece, zeroed and aligned to 4 KiB. Throws Error(memory) with `what` if too
  /// little is left.
  HostBytes allocate(Bytes bytes, std::string_view what);

  /// The whole mapping.
  [[nodiscard]] HostBytes memory() const { return mapping_.bytes(); }
  [[nodiscard]] Bytes capacity() const { return mapping_.bytes().size(); }
  [[nodiscard]] Bytes allocated() const { return allocated_; }

 private:
  Mapping mapping_;
  Bytes allocated_ = 0;
};

}  // namespace ballast::memory
