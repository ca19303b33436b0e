#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ballast/core/random.h"

namespace ballast::test {

/// Positions [sequences, length] of tokens in documents that fill the sequences. The documents are
/// short and long, some of one token.
inline std::vector<std::int32_t> packed_positions(std::size_t sequences, std::size_t length,
                                                  std::uint64_t seed = 1) {
  std::vector<std::int32_t> positions(sequences * length);
  std::uint64_t drawn = 0;
  for (std::size_t at = 0; at < positions.size(); ++at) {
    const bool starts = at % length == 0 || random_u64(seed, ++drawn) % (length / 3 + 2) == 0;
    positions[at] = starts ? 0 : positions[at - 1] + 1;
  }
  return positions;
}

}  // namespace ballast::test
