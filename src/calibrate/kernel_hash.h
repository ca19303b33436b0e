#pragma once

#include <string_view>

namespace ballast::calibrate {

/// Returns a hash of the sources of all kernels (models, optimizer updates, devices and file I/O).
/// Rates measured with other sources are not used.
std::string_view kernel_hash() noexcept;

}  // namespace ballast::calibrate
