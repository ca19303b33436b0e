#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>

#include <fmt/format.h>
#include <omp.h>

#include "ballast/core/cpu.h"
#include "ballast/core/error.h"
#include "ballast/core/mapping.h"
#include "ballast/device/host_stream.h"

#include "src/device/device_memory.h"
#include "src/device/factories.h"

namespace ballast::device {
namespace {

class HostEvent final : public Event {
 public:
  void record(Stream& stream) override {
    const std::scoped_lock lock(mutex_);
    stream_ = &as_host(stream);
    count_ = stream_->enqueued();
  }
  void wait_on(Stream& stream) override {
    const auto [source, count] = recorded();
    if (source == nullptr || source == &stream) return;
    as_host(stream).enqueue([source = source, count = count] { source->wait_until(count); });
  }
  void synchronize() override {
    const auto [source, count] = recorded();
    if (source == nullptr) return;
    source->wait_until(count);
    source->throw_failure_within(count);
  }

 private:
  struct Mark {
    HostStream* stream;
    std::uint64_t count;
  };
  Mark recorded() {
    const std::scoped_lock lock(mutex_);
    return {stream_, count_};
  }

  std::mutex mutex_;
  HostStream* stream_ = nullptr;
  std::uint64_t count_ = 0;
};

/// The host device copies any memory equally fast, so nothing needs to be pinned.
class NothingPinned final : public Pin {};

/// Stands in for a GPU: `budget` bytes of address space, zeroed by the kernel.
class HostDevice final : public Device {
 public:
  explicit HostDevice(const DeviceOptions& options)
      : arena_(options.budget, "memory of the host device (ballast.device_bytes)"),
        memory_({arena_.bytes().data(), arena_.bytes().size()}),
        threads_(options.compute_threads > 0 ? options.compute_threads : default_compute_threads()),
        link_gbps_(options.link_gbps) {
    if (options.budget == 0)
      throw Error(ErrorCategory::memory, "ballast.device_bytes is 0; raise it");
  }

  std::string_view kind() const override { return "host"; }
  std::string description() const override {
    return fmt::format("host device, {}, {} thread{}", cpu_name(), threads_,
                       threads_ == 1 ? "" : "s");
  }

  DeviceBytes allocate(Bytes bytes, std::string_view what) override {
    return memory_.take(bytes, what);
  }
  Bytes budget() const override { return memory_.budget(); }
  Bytes allocated() const override { return memory_.taken(); }

  std::unique_ptr<Stream> make_stream(std::string_view name) override {
    return std::make_unique<HostStream>(std::string(name), threads_);
  }
  std::unique_ptr<Event> make_event() override { return std::make_unique<HostEvent>(); }

  std::unique_ptr<Pin> pin(HostBytes, std::string_view) override {
    return std::make_unique<NothingPinned>();
  }

  void copy_to_device(Stream& stream, DeviceBytes to, ConstHostBytes from) override {
    expects(to.size() == from.size(), "copy_to_device: sizes differ");
    enqueue_copy(stream, to.raw(), from.data(), from.size());
  }
  void copy_to_host(Stream& stream, HostBytes to, ConstDeviceBytes from) override {
    expects(to.size() == from.size(), "copy_to_host: sizes differ");
    enqueue_copy(stream, to.data(), from.raw(), from.size());
  }
  bool connect(Device&) override { return true; }
  void copy_to_other(Stream& stream, Device&, DeviceBytes to, ConstDeviceBytes from) override {
    expects(to.size() == from.size(), "copy_to_other: sizes differ");
    enqueue_copy(stream, to.raw(), from.raw(), from.size());
  }

 private:
  void enqueue_copy(Stream& stream, std::byte* to, const std::byte* from, Bytes bytes) const {
    as_host(stream).enqueue([this, to, from, bytes] {
      const auto start = std::chrono::steady_clock::now();
      if (bytes != 0) std::memcpy(to, from, bytes);
      if (link_gbps_ > 0.0) {
        const double seconds = static_cast<double>(bytes) / (link_gbps_ * 1e9);
        std::this_thread::sleep_until(start + std::chrono::duration<double>(seconds));
      }
    });
  }

  Mapping arena_;
  DeviceMemory memory_;
  int threads_;
  double link_gbps_;
};

}  // namespace

int default_compute_threads() {
  return std::clamp(omp_get_max_threads(), 1, usable_cpus());
}

std::unique_ptr<Device> make_host_device(const DeviceOptions& options) {
  return std::make_unique<HostDevice>(options);
}

}  // namespace ballast::device
