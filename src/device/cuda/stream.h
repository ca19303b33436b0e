#pragma once

#include <memory>
#include <string_view>

#include "ballast/device/cuda_stream.h"

namespace ballast::device {

/// A stream of GPU number `ordinal`, ordered with no other one. `name`: for error messages. Throws
/// Error(device).
std::unique_ptr<CudaStream> make_cuda_stream(int ordinal, std::string_view name);

/// An event of GPU number `ordinal`. Its synchronize() looks at no watches.
std::unique_ptr<Event> make_cuda_event(int ordinal);

}  // namespace ballast::device
