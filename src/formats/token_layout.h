#pragma once

#include <cstddef>
#include <cstdint>

#include "ballast/core/units.h"

namespace ballast::formats {

/// Place of the tokens of a file: `count` little-endian ids of `width` bytes (1, 2, 4 or 8) from
/// byte `offset`.
struct TokenLayout {
  Bytes offset = 0;
  std::size_t width = 1;
  std::uint64_t count = 0;
  bool is_signed = false;
  bool stated = true;  ///< whether the file states its type; otherwise data.token_type or the
                       ///< vocabulary does
};

}  // namespace ballast::formats
