#pragma once

#include <cstdint>

namespace ballast::model {

/// Target of a row that takes no part in the loss: a token of a prompt, or the last one of a
/// document.
inline constexpr std::int32_t kIgnoredTarget = -1;
/// Target of a row of padding, which belongs to no document. Routers also send it to no expert.
inline constexpr std::int32_t kPaddingTarget = -2;

}  // namespace ballast::model
