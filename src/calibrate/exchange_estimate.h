#pragma once

#include <cstdint>

namespace ballast::calibrate {

/// Estimates the bytes per second that each of `ranks` processes of this machine receives when all
/// exchange data over shared memory. Every byte is copied into a shared segment and out of it, so
/// the result is half the speed of copies by one thread per rank at the same time. Takes a few
/// hundredths of a second.
double estimate_exchange(std::uint32_t ranks);

}  // namespace ballast::calibrate
