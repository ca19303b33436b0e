#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ballast/core/units.h"
#include "ballast/core/view.h"

namespace ballast::tools {

/// What a measured file holds: each 8-byte word is a mixed-up (file, offset, pass), so that it does
/// not compress, and a word found somewhere tells where and when it was written. A pass is the
/// number of times that a page has been written, kept per page.
class IoContent {
 public:
  static constexpr Bytes kLargestFile = Bytes{1} << 45;
  static constexpr unsigned kMostFiles = 64;

  /// `file`: number of the file, below kMostFiles. `size`: at most kLargestFile; whole pages.
  IoContent(unsigned file, Bytes size);

  /// Fills whole pages with what [offset, offset + block.size()) shall hold after its next write,
  /// and expects that from now on.
  void fill_next(HostBytes block, Bytes offset);
  /// Fills with what is expected now.
  void fill(HostBytes block, Bytes offset) const;
  /// "" when the block is what was last written at `offset`, else what is wrong, and where:
  /// "offset=4096: ...".
  [[nodiscard]] std::string mistake(HostBytes block, Bytes offset) const;

  /// Memory that the passes of a file take.
  static Bytes bytes_needed(Bytes size) { return size / kPage * sizeof(std::uint16_t); }

 private:
  [[nodiscard]] std::uint64_t tag(Bytes offset) const;
  [[nodiscard]] std::string explain(Bytes offset, std::uint64_t found) const;

  std::uint64_t file_;
  Bytes size_;
  std::vector<std::uint16_t> passes_;
};

}  // namespace ballast::tools
