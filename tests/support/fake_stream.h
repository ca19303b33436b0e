#pragma once

#include <cstdint>
#include <functional>

#include <cuda_runtime_api.h>

#include "tests/support/fake_memory.h"

namespace ballast::test {

/// Work of the fake GPU. Without a seed (FakeCuda::seed) it runs when it is enqueued. With one,
/// streams are queues: work runs at the call that enqueues it, at a later call of any thread, or
/// when somebody waits for it, and the work of several streams interleaves. The order respects
/// streams and events. One thread at a time performs work, on behalf of the GPU.

/// Runs `work` of the current GPU in the order of `stream`. `zeroed`: an allocation that it zeroes
/// as a whole. `others`: further GPUs whose memory it uses.
cudaError_t on_stream(cudaStream_t stream, std::function<void()> work, const void* zeroed = nullptr,
                      GpuSet others = 0);

/// Calls `ended` repeatedly in the order of `stream` until it returns true. For work that waits for
/// other processes. Device memory is accessible from its first to its last call.
cudaError_t on_stream_until(cudaStream_t stream, std::function<bool()> ended);

/// Blocks until all work of the stream enqueued so far is done.
void await_stream(cudaStream_t stream);
/// Blocks until all work of all streams is done.
void await_all_streams();
/// Returns whether the work of the stream is done, after a random amount of work.
bool is_idle(cudaStream_t stream);
/// Number of items of work that are not done.
std::size_t pending_work();

/// Events. A wait refers to the last record before it; events that were never recorded are done.
void record_event(cudaEvent_t event, cudaStream_t stream);
void wait_for_event(cudaStream_t stream, cudaEvent_t event);
void await_event(cudaEvent_t event);
bool is_over(cudaEvent_t event);
/// Returns the GPU's clock at the last record that was performed; negative if there was none.
double time_of(cudaEvent_t event);
void forget_event(cudaEvent_t event);

/// Notes the launch of a kernel. Refuses the first launch of a kernel in a step
/// (FakeCuda::NoAllocation), because it loads the kernel's code.
cudaError_t launch_on_stream(cudaStream_t stream, const void* kernel, std::function<void()> grid);
/// Notes that a kernel's code was loaded.
cudaError_t load_kernel(const void* kernel);

}  // namespace ballast::test
