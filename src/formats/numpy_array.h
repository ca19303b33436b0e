#pragma once

#include <filesystem>

#include "ballast/core/descriptor.h"
#include "ballast/core/units.h"

#include "src/formats/token_layout.h"

namespace ballast::formats {

/// The layout of token ids in an open file of `size` bytes that begins like a NumPy array. Throws
/// Error(data) naming the file: a damaged header, a size that does not match it, more than one
/// dimension, a type other than little-endian integers. Source: numpy.lib.format.
TokenLayout numpy_layout(const std::filesystem::path& path, const Descriptor& file, Bytes size);

}  // namespace ballast::formats
