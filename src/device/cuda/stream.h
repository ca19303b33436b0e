#pragma once

#include <memory>
#include <string_view>

#include "ballast/device/cuda_stream.h"

namespace ballast::device {

/// Makes a GPU the current one of the calling thread. Throws Error(device).
void select_gpu(int ordinal);

/// Makes a stream of GPU `ordinal`, not ordered with others. `name`: for messages. Throws
/// Error(device).
std::unique_ptr<CudaStream> make_cuda_stream(int ordinal, std::string_view name);

/// Makes an event of GPU `ordinal`. record() takes the stream's watches and verdicts, which the
/// event's synchronize() then calls.
std::unique_ptr<Event> make_cuda_event(int ordinal);

}  // namespace ballast::device
