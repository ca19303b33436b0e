// Registers the emulated device: its memory, streams and events, and what PyTorch asks of it.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"
#include "storage.h"
#include "streams.h"

namespace second_device {
namespace {

const c10::Device kDevice(c10::DeviceType::PrivateUse1, 0);

struct Event {
  MarkRef mark;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream wrapped(StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, kDevice, static_cast<c10::StreamId>(id));
  }
  static StreamId id_of(const c10::Stream& stream) { return static_cast<StreamId>(stream.id()); }

  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() <= 0, "second device: there is one, not device ", device.index());
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return wrapped(current_stream()); }
  c10::Stream getDefaultStream(c10::Device) const override { return wrapped(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return wrapped(new_stream());
  }
  c10::Stream getNewStream(c10::Device, int) const override { return wrapped(new_stream()); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return wrapped(exchange_stream(id_of(stream)));
  }
  bool queryStream(const c10::Stream& stream) const override { return idle(id_of(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(id_of(stream)); }
  void synchronizeDevice(const c10::DeviceIndex) const override { synchronize_all(); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    static_cast<Event*>(*event)->mark = second_device::record(id_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) second_device::block(id_of(stream), static_cast<Event*>(event)->mark);
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || reached(static_cast<Event*>(event)->mark);
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) synchronize(static_cast<Event*>(event)->mark);
  }
  double elapsedTime(void* first, void* last, const c10::DeviceIndex) const override {
    const MarkRef& from = static_cast<Event*>(first)->mark;
    const MarkRef& to = static_cast<Event*>(last)->mark;
    TORCH_CHECK(reached(from) && reached(to), "second device: both events must be reached");
    return 1e3 * seconds_between(from, to);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_use(data.get(), id_of(stream));
  }
};

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    void* at = second_device::allocate(bytes, current_stream());
    return {at, at, &release, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    copy_bytes(target, source, bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record_use(data.get(), Guard::id_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    const MemoryStats now = memory_stats();
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes}) {
      (*bytes)[0].current = static_cast<std::int64_t>(now.allocated);
      (*bytes)[0].peak = static_cast<std::int64_t>(now.peak);
    }
    stats.num_device_alloc = static_cast<std::int64_t>(now.allocations);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { reset_peak(); }
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex) override {
    const MemoryStats now = memory_stats();
    return {now.budget - now.allocated, now.budget};
  }
};

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    void* at = allocate_pinned(bytes);
    return {at, at, &release_pinned, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }  // copies own the memory
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

DeviceMemory device_memory;
PinnedMemory pinned_memory;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    TORCH_CHECK(index == 0, "second device: there is one, not device ", int{index});
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* data) const override { return pinned_owner(data) != nullptr; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Device getDeviceFromPtr(void*) const override { return kDevice; }
  // Random numbers are those of the CPU's generator, so that they are equal to the CPU's.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

const bool registered = [] {
  c10::SetAllocator(c10::DeviceType::PrivateUse1, &device_memory);
  at::setHostAllocator(c10::DeviceType::PrivateUse1, &pinned_memory);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace
}  // namespace second_device
