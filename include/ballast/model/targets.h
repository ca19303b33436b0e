#pragma once

#include <cstdint>

namespace ballast::model {

/// Target of a row without a loss: a token of a prompt, or the last one of a document.
inline constexpr std::int32_t kIgnoredTarget = -1;
/// Target of a padding row, which belongs to no document. Routers send it to no expert.
inline constexpr std::int32_t kPaddingTarget = -2;

}  // namespace ballast::model
