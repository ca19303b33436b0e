#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "ballast/core/units.h"
#include "ballast/core/view.h"

namespace ballast::device {

/// A queue of device work that runs in order, asynchronously to the host.
class Stream {
 public:
  virtual ~Stream() = default;
  Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  /// Blocks until everything enqueued so far is done. Rethrows, once, the first Error that work on
  /// this stream has raised; work behind a failed item is dropped until then.
  virtual void synchronize() = 0;
};

/// A point in a stream.
class Event {
 public:
  virtual ~Event() = default;
  Event() = default;
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  /// Marks the present end of `stream`. An event may be recorded again; waits refer to the last
  /// record made before them.
  virtual void record(Stream& stream) = 0;
  /// Work enqueued on `stream` after this call starts after the event.
  virtual void wait_on(Stream& stream) = 0;
  /// Blocks the host until the event. Throws the first Error that work before it has raised, unless
  /// the stream's synchronize() was there first.
  virtual void synchronize() = 0;
};

/// Host memory that is pinned for as long as this lives: see Device::pin.
class Pin {
 public:
  virtual ~Pin() = default;
  Pin() = default;
  Pin(const Pin&) = delete;
  Pin& operator=(const Pin&) = delete;
};

/// A compute device with its own memory of a fixed budget. Thread-safe.
class Device {
 public:
  virtual ~Device() = default;
  Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  /// "host" or "cuda".
  [[nodiscard]] virtual std::string_view kind() const = 0;
  /// For people: "host device, AMD EPYC, 2 threads".
  [[nodiscard]] virtual std::string description() const = 0;

  /// Device memory for `what`, page-aligned, zeroed, owned by the device until its end. Throws
  /// Error(memory) naming `what`, the request and what is left, when the budget does not hold it.
  virtual DeviceBytes allocate(Bytes bytes, std::string_view what) = 0;
  [[nodiscard]] virtual Bytes budget() const = 0;
  /// Bytes allocated now; nothing is given back before the device ends, so this is also the peak.
  [[nodiscard]] virtual Bytes allocated() const = 0;

  virtual std::unique_ptr<Stream> make_stream(std::string_view name) = 0;
  virtual std::unique_ptr<Event> make_event() = 0;

  /// Makes copies to and from `memory` as fast as the link, and asynchronous, until the Pin ends;
  /// copies are over by then, and memory and device are still there. `memory`: page-aligned, not
  /// pinned already. Its pages become resident, which takes seconds per 10 GiB. `setting`: what
  /// says how large it is, for messages. Throws Error(memory) or Error(interrupted), and then
  /// nothing is pinned.
  virtual std::unique_ptr<Pin> pin(HostBytes memory, std::string_view setting) = 0;

  /// Enqueues a copy; sizes are equal, both ranges stay valid and untouched until it is done. Host
  /// memory that is not pinned may be copied too: slower, and the call may wait for the copy.
  virtual void copy_to_device(Stream& stream, DeviceBytes to, ConstHostBytes from) = 0;
  virtual void copy_to_host(Stream& stream, HostBytes to, ConstDeviceBytes from) = 0;
};

struct DeviceOptions {
  std::string kind = "auto";  ///< auto, host or cuda
  Bytes budget = 0;           ///< bytes of device memory
  int compute_threads = 0;    ///< host device: threads of a kernel; 0: all CPUs, or OMP_NUM_THREADS
  double link_gbps = 0.0;     ///< host device: copies take bytes / link_gbps GB/s; 0: not throttled
  std::uint32_t local_rank = 0;  ///< cuda: which GPU, modulo the number of those that are visible
  /// When set and true, pin() throws Error(interrupted) before it goes on to the next part.
  const std::atomic<bool>* interrupted = nullptr;
};

/// Makes the device. "auto" takes the host device, because no GPU has run the kernels of the other
/// one yet, and logs once what it knows of CUDA; "cuda" by name throws Error(device) where
/// cuda_refusal() has a reason.
std::unique_ptr<Device> make_device(const DeviceOptions& options);

/// The kind() of the device that such options make, before there is one.
std::string_view kind_of(const DeviceOptions& options);

/// Whether it is the host's cores that work for the device that such options make: its kernels and
/// copies then take from what the rest of the program has of them, and there is no link but memory
/// (which link_gbps slows down).
bool shares_host_cores(const DeviceOptions& options);

/// Whether this program was compiled with CUDA.
bool cuda_built_in();

/// Empty when device "cuda" can be made here; else the reason, one line. The first call may take
/// seconds: it starts the driver.
std::string cuda_refusal();

/// Free memory of the device that such options make, where it has memory of its own: 0 for the host
/// device and where there is none.
Bytes own_memory(const DeviceOptions& options);

/// What tells the GPU of such options from others, "" for the host device. "cuda" throws like
/// make_device.
std::string gpu_name(const DeviceOptions& options);

}  // namespace ballast::device
