#pragma once

#include <string_view>

namespace ballast {

/// Version of this build, "major.minor.patch".
std::string_view version() noexcept;

}  // namespace ballast
