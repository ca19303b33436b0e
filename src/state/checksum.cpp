#include "ballast/state/checksum.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace ballast::state {

std::uint64_t checksum(ConstHostBytes bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

}  // namespace ballast::state
