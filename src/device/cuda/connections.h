#pragma once

namespace ballast::device {

/// Sets CUDA_DEVICE_MAX_CONNECTIONS to 32, unless the environment has a value. Must precede the
/// first CUDA call of the process. The default of 8 hardware queues is less than the streams of
/// Ballast and NCCL together. Streams that share a queue wait for each other, so a copy could wait
/// for a collective that waits for another rank.
void raise_connections();

}  // namespace ballast::device
