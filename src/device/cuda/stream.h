#pragma once

#include <memory>
#include <string_view>

#include "ballast/device/cuda_stream.h"

namespace ballast::device {

/// Makes a stream of GPU `ordinal`, not ordered with others. `name`: for messages. Throws
/// Error(device).
std::unique_ptr<CudaStream> make_cuda_stream(int ordinal, std::string_view name);

/// Makes an event of GPU `ordinal`. Its synchronize() calls no watches.
std::unique_ptr<Event> make_cuda_event(int ordinal);

}  // namespace ballast::device
