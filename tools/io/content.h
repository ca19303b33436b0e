#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ballast/core/units.h"
#include "ballast/core/view.h"

namespace ballast::tools {

/// Content of a measured file: each 8-byte word is an invertible hash of (file, offset, pass), so
/// that it does not compress and identifies the write. A pass counts the writes of a page.
class IoContent {
 public:
  static constexpr Bytes kLargestFile = Bytes{1} << 45;
  static constexpr unsigned kMostFiles = 64;

  /// `file`: number of the file, below kMostFiles. `size`: at most kLargestFile, in whole pages.
  IoContent(unsigned file, Bytes size);

  /// Fills whole pages with the next content of [offset, offset + block.size()). From now on this
  /// content is expected there.
  void fill_next(HostBytes block, Bytes offset);
  /// Fills with the expected content.
  void fill(HostBytes block, Bytes offset) const;
  /// Returns "" if the block has the expected content of `offset`, otherwise the difference:
  /// "offset=4096: ...".
  [[nodiscard]] std::string mistake(HostBytes block, Bytes offset) const;

  /// Memory for the pass counters of a file.
  static Bytes bytes_needed(Bytes size) { return size / kPage * sizeof(std::uint16_t); }

 private:
  [[nodiscard]] std::uint64_t tag(Bytes offset) const;
  [[nodiscard]] std::string explain(Bytes offset, std::uint64_t found) const;

  std::uint64_t file_;
  Bytes size_;
  std::vector<std::uint16_t> passes_;
};

}  // namespace ballast::tools
