#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "ballast/core/dtype.h"
#include "ballast/core/memory.h"
#include "ballast/core/units.h"

namespace ballast::device {

/// A queue of device work that runs in order, asynchronously to the host.
class Stream {
 public:
  virtual ~Stream() = default;
  Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  /// Blocks until everything enqueued so far is done. Rethrows, once, the first Error of work on
  /// this stream. Until then, work after a failed item is dropped.
  virtual void synchronize() = 0;
};

/// A point in a stream.
class Event {
 public:
  virtual ~Event() = default;
  Event() = default;
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  /// Marks the current end of `stream`. An event may be recorded again; a wait refers to the last
  /// record before it.
  virtual void record(Stream& stream) = 0;
  /// Work enqueued on `stream` after this call starts after the event.
  virtual void wait_on(Stream& stream) = 0;
  /// Blocks the host until the event. Throws the first Error of work before it, unless the stream's
  /// synchronize() has already thrown it.
  virtual void synchronize() = 0;
};

/// Keeps host memory pinned during its lifetime; see Device::pin.
class Pin {
 public:
  virtual ~Pin() = default;
  Pin() = default;
  Pin(const Pin&) = delete;
  Pin& operator=(const Pin&) = delete;

  /// Returns the pinned bytes, which may be fewer than requested. 0 on the host device.
  [[nodiscard]] virtual Bytes bytes() const { return 0; }
};

/// A compute device with a fixed memory budget. Thread-safe.
class Device {
 public:
  virtual ~Device() = default;
  Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  /// Returns "host" or "cuda".
  [[nodiscard]] virtual std::string_view kind() const = 0;
  /// Returns a description for messages: "host device, AMD EPYC, 2 threads".
  [[nodiscard]] virtual std::string description() const = 0;

  /// Returns page-aligned, zeroed device memory, which the device owns. Throws Error(memory) with
  /// `what`, the requested and the remaining bytes if it exceeds the budget.
  virtual DeviceBytes allocate(Bytes bytes, std::string_view what) = 0;
  [[nodiscard]] virtual Bytes budget() const = 0;
  /// Bytes allocated so far. This is also the peak, because memory is freed only with the device.
  [[nodiscard]] virtual Bytes allocated() const = 0;

  virtual std::unique_ptr<Stream> make_stream(std::string_view name) = 0;
  virtual std::unique_ptr<Event> make_event() = 0;

  /// Pins `memory` (page-aligned, not yet pinned) for the lifetime of the Pin, so that copies run
  /// asynchronously at full link speed. Copies must finish, and memory and device must outlive the
  /// Pin. Makes the pages resident, which takes seconds per 10 GiB. `setting`: the config key of
  /// the size, for messages. If the system refuses to pin all of it, the rest remains pageable and
  /// a warning is logged. Throws Error(memory) if `memory` overlaps with pinned memory, and
  /// Error(device) or Error(interrupted); then nothing is pinned.
  virtual std::unique_ptr<Pin> pin(HostBytes memory, std::string_view setting) = 0;

  /// Enqueues a copy; both ranges have equal sizes and must stay valid and unchanged until it is
  /// done. Copies of unpinned host memory are slower, and the call may block until they are done.
  virtual void copy_to_device(Stream& stream, DeviceBytes to, ConstHostBytes from) = 0;
  virtual void copy_to_host(Stream& stream, HostBytes to, ConstDeviceBytes from) = 0;

  /// Prepares copies to and from `other`, a device of the same kind. Returns whether they are
  /// direct; otherwise they pass through host memory. Throws Error(device).
  virtual bool connect(Device& other) = 0;
  /// Enqueues a copy on a stream of this device: `from` is in its memory, `to` in that of `other`,
  /// to which it is connected, or which is this device. Both ranges have equal sizes and must stay
  /// valid and unchanged until it is done.
  virtual void copy_to_other(Stream& stream, Device& other, DeviceBytes to,
                             ConstDeviceBytes from) = 0;
};

struct DeviceOptions {
  std::string kind = "auto";  ///< auto, host or cuda
  DType type = DType::bf16;   ///< training type; old GPUs lack bf16
  Bytes budget = 0;           ///< bytes of device memory
  int compute_threads = 0;    ///< host device: threads per kernel; 0: all CPUs, or OMP_NUM_THREADS
  double link_gbps = 0.0;     ///< host device: speed of copies, GB/s; 0: not throttled
  std::uint32_t local_rank = 0;  ///< cuda: GPU number, modulo the number of visible GPUs
  /// cuda: whether a GPU without cuBLASLt cannot be used. False for plain kernels
  /// (model::KernelSet), which need no library.
  bool needs_libraries = true;
  /// When set and true, pin() throws Error(interrupted) before its next part.
  const std::atomic<bool>* interrupted = nullptr;
};

/// Makes the device. "auto" selects the CUDA device if gpu_refusal() is empty. If this process has
/// no GPU, or one that is too old for any training, "auto" selects the host device and logs the
/// reason once. If it has a GPU that only lacks a driver, a library or the training type, "auto"
/// throws Error(device) with the remedy. "cuda" throws Error(device) whenever gpu_refusal() is not
/// empty.
std::unique_ptr<Device> make_device(const DeviceOptions& options);

/// Returns whether this process has a GPU that cannot be used, for a reason with a remedy. Then
/// "auto" is refused.
bool has_unusable_gpu(const DeviceOptions& options);

/// Throws Error(device) if make_device(options) would, except for its memory.
void require_device(const DeviceOptions& options);

/// Returns the kind() of the device that make_device(options) would return. Throws like
/// require_device() for "auto".
std::string_view kind_of(const DeviceOptions& options);

/// Returns whether the device uses the host's cores. Kernels and copies then compete with the rest
/// of the program for them, and the only link is memory (throttled by link_gbps).
bool shares_host_cores(const DeviceOptions& options);

/// Returns the number of GPUs that this process sees; 0 without CUDA, a driver or a GPU.
std::uint32_t count_gpus();

/// Returns whether this program was compiled with CUDA.
bool cuda_built_in();

/// Returns the toolkit of the build and the driver that it needs, "CUDA 13.0, for drivers from 580
/// on"; "" if built without CUDA.
std::string cuda_requirement();

/// Returns the compute capabilities of the GPUs for which the build has machine code, "8.0, 8.9,
/// 9.0". On newer GPUs the driver compiles the kernels when they are first used. "" if built
/// without CUDA, or for the GPU of the machine that built it.
std::string gpu_code();

/// Returns why device "cuda" is not available, in one line; empty if it is. The first call starts
/// the driver, which may take seconds.
std::string cuda_refusal();

/// Returns why this process cannot train on its GPU in the type of `options`, in one line; empty if
/// it can. Reasons: cuda_refusal(), a GPU of compute capability below 7.5 (8.0 for bf16), or a
/// missing cuBLASLt if `options` need it. The first call of each local rank starts the driver and
/// loads cuBLASLt.
std::string gpu_refusal(const DeviceOptions& options);

/// Returns the free bytes of the device's separate memory; 0 for the host device or without a GPU.
Bytes own_memory(const DeviceOptions& options);

/// Returns name and memory of the GPU; "" for the host device. Throws like make_device().
std::string gpu_name(const DeviceOptions& options);

/// Direction of copies: to the device, from it, or both at once.
enum class CopyWay { up, down, both };

/// Plain copies of one size between device and host memory: the baseline for the device's copies.
class PlainCopies {
 public:
  virtual ~PlainCopies() = default;
  PlainCopies() = default;
  PlainCopies(const PlainCopies&) = delete;
  PlainCopies& operator=(const PlainCopies&) = delete;

  /// Makes `count` copies in each direction of `way` and waits for them. Throws Error(device).
  virtual void run(CopyWay way, std::size_t count) = 0;
};

/// Makes copies of `bytes`. Host device: memcpy by one thread per direction. CUDA device:
/// cudaMemcpyAsync with memory of cudaMallocHost. They allocate 2 * `bytes` on either side, outside
/// the device budget. `device` must outlive them. Throws Error(memory) or Error(device).
std::unique_ptr<PlainCopies> make_plain_copies(Device& device, Bytes bytes);

/// A named range of this thread's time in NVIDIA's profilers (NVTX), during the object's lifetime.
/// Costs next to nothing without a profiler. Ranges of a thread are nested.
class ProfilerRange {
 public:
  explicit ProfilerRange(const std::string& name);
  ~ProfilerRange();
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;
};

/// Returns why this program has no ranges, in one line, or "".
std::string profiler_refusal();

}  // namespace ballast::device
