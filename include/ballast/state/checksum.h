#pragma once

#include <cstdint>

#include "ballast/core/view.h"

namespace ballast::state {

/// XXH3 (64 bits) of `bytes`, by which damaged data are found.
std::uint64_t checksum(ConstHostBytes bytes);

}  // namespace ballast::state
