#pragma once

#include <algorithm>
#include <cstdint>

#include "ballast/core/units.h"

namespace ballast::comm {

/// A buffer cut into one part per rank, in pages. Parts are equal but for the last ones, which may
/// be shorter or empty.
class Parts {
 public:
  Parts(Bytes bytes, std::uint32_t world)
      : pages_(bytes / kPage), longest_((pages_ + world - 1) / world) {}

  [[nodiscard]] std::uint64_t longest() const { return longest_; }
  /// Where page `page` of rank's part is, from the beginning of the buffer.
  [[nodiscard]] std::uint64_t at(std::uint32_t rank, std::uint64_t page) const {
    return std::min(rank * longest_ + page, pages_);
  }
  /// How many of the pages [page, page + count) of rank's part there are.
  [[nodiscard]] std::uint64_t count(std::uint32_t rank, std::uint64_t page,
                                    std::uint64_t count) const {
    return at(rank, std::min(page + count, longest_)) - at(rank, page);
  }

 private:
  std::uint64_t pages_;
  std::uint64_t longest_;
};

}  // namespace ballast::comm
