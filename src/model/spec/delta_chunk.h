#pragma once

#include <cstddef>

namespace ballast::model {

/// Rows of a sequence that the recurrence of a gated delta net computes together.
inline constexpr std::size_t kDeltaChunk = 64;

}  // namespace ballast::model
