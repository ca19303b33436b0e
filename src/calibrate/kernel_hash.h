#pragma once

#include <string_view>

namespace ballast::calibrate {

/// Hash of the sources of all kernels (models, optimizer updates, devices and file I/O). Rates that
/// were measured with other sources do not count.
std::string_view kernel_hash() noexcept;

}  // namespace ballast::calibrate
