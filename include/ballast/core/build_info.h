#pragma once

#include <string>
#include <string_view>

namespace ballast {

/// Version of this build, "major.minor.patch".
std::string_view version() noexcept;

/// Build id that the linker wrote into the program or library with this code, in hexadecimal
/// digits: equal for copies of a build, also stripped ones. "" if it wrote none.
std::string build_id();

}  // namespace ballast
