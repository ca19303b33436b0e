#include "tests/support/fake_cuda.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <unistd.h>

#include "src/device/cuda/runtime.h"
#include "tests/support/fake_memory.h"
#include "tests/support/fake_stream.h"

namespace {

constexpr int kDevices = 4;

thread_local cudaError_t last_error = cudaSuccess;
thread_local int current_device = 0;

/// The runtime keeps failures until they are queried.
cudaError_t remembered(cudaError_t code) {
  if (code != cudaSuccess) last_error = code;
  return code;
}

using ballast::test::await_all_streams;
using ballast::test::await_event;
using ballast::test::await_stream;
using ballast::test::FakeCuda;
using ballast::test::FakeMemory;
using ballast::test::forget_event;
using ballast::test::is_idle;
using ballast::test::is_over;
using ballast::test::on_stream;
using ballast::test::pending_work;
using ballast::test::record_event;
using ballast::test::time_of;
using ballast::test::wait_for_event;

std::mutex registry_mutex;
std::map<std::byte*, FakeCuda::Piece>& registry() {
  static std::map<std::byte*, FakeCuda::Piece> pieces;
  return pieces;
}

/// Returns whether the call may allocate or free memory now.
bool may_allocate() {
  if (!FakeCuda::NoAllocation::exists()) return true;
  ++FakeCuda::NoAllocation::refused;
  return false;
}

/// The result of a query of work, which may have to look busy.
template <class Done>
cudaError_t busy_or_done(const Done& is_done) {
  auto& busy = FakeCuda::busy_queries;
  if (busy > 0 && busy-- > 0) return remembered(cudaErrorNotReady);
  if (FakeCuda::seed != 0 && !is_done()) return remembered(cudaErrorNotReady);
  return FakeCuda::answer("");
}

/// How a range overlaps with the registered ranges.
enum class Lies { outside, in_one, across };

Lies where(const std::byte* start, std::size_t size) {
  const std::scoped_lock lock(registry_mutex);
  for (const auto& [first, piece] : registry()) {
    const std::byte* const end = first + piece.size;
    if (start >= end || first >= start + size) continue;
    return start >= first && start + size <= end ? Lies::in_one : Lies::across;
  }
  return Lies::outside;
}

/// The devices of streams and events by address.
class Owners {
 public:
  void* make() {
    void* const made = std::malloc(1);
    const std::scoped_lock lock(mutex_);
    devices_[made] = current_device;
    return made;
  }
  void end(void* object) {
    const std::scoped_lock lock(mutex_);
    devices_.erase(object);
    std::free(object);
  }
  std::size_t count() {
    const std::scoped_lock lock(mutex_);
    return devices_.size();
  }
  /// Whether the calling thread's current device is that of `object`; null belongs to any.
  bool own(const void* object) {
    const std::scoped_lock lock(mutex_);
    const auto found = devices_.find(object);
    return object == nullptr || (found != devices_.end() && found->second == current_device);
  }

 private:
  std::mutex mutex_;
  std::map<const void*, int> devices_;
};
Owners& owners() {
  static auto* const kept = new Owners;  // objects may be destroyed after static ones
  return *kept;
}

/// Answers a call, which may be refused. Notes a call whose stream or event belongs to another
/// device than the current one. CUDA accepts some of these calls, but starts the current device for
/// them.
template <class... Objects>
cudaError_t answer_to(const char* call, Objects... objects) {
  if (const cudaError_t refused = FakeCuda::answer(call)) return remembered(refused);
  if ((owners().own(objects) && ...)) return cudaSuccess;
  ++FakeCuda::wrong_device;
  return remembered(cudaErrorInvalidResourceHandle);
}

/// Refuses an allocation or its end in a step.
cudaError_t answer_to_allocation(const char* call) {
  if (const cudaError_t refused = FakeCuda::answer(call)) return remembered(refused);
  if (may_allocate()) return cudaSuccess;
  FakeCuda::complain(std::string(call) + " in a step");
  return remembered(cudaErrorNotPermitted);
}

/// Allocations of cudaMallocHost.
std::map<std::byte*, std::size_t>& host_pieces() {
  static auto* const pieces = new std::map<std::byte*, std::size_t>;
  return *pieces;
}
bool is_page_locked(const void* memory, std::size_t size) {
  const auto* const start = static_cast<const std::byte*>(memory);
  if (where(start, size) == Lies::in_one) return true;
  const std::scoped_lock lock(registry_mutex);
  auto next = host_pieces().upper_bound(const_cast<std::byte*>(start));
  if (next == host_pieces().begin()) return false;
  --next;
  return start + size <= next->first + next->second;
}

/// Returns whether the range lies in one allocation of device memory. Without a seed, tests may use
/// any memory as that of the GPU.
bool is_device_memory(const char* call, const void* start, std::size_t size) {
  if (FakeCuda::seed == 0 || FakeMemory::where(start, size) == FakeMemory::Where::inside) {
    return true;
  }
  FakeCuda::complain(std::string(call) + ": a range that is not in one allocation of the GPU");
  return false;
}
bool is_host_memory(const char* call, const void* start, std::size_t size) {
  if (FakeCuda::seed == 0 || FakeMemory::where(start, size) == FakeMemory::Where::outside) {
    return true;
  }
  FakeCuda::complain(std::string(call) + ": device memory in the place of host memory");
  return false;
}
void expect_no_work(const char* call) {
  if (FakeCuda::seed == 0 || pending_work() == 0) return;
  FakeCuda::complain(std::string(call) + " while work is pending");
  await_all_streams();
}

bool mapped(std::byte* start, std::size_t size) {
  const std::size_t before =
      reinterpret_cast<std::uintptr_t>(start) % static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return msync(start - before, size + before, MS_ASYNC) == 0;
}

}  // namespace

std::vector<FakeCuda::Piece> FakeCuda::registered() {
  const std::scoped_lock lock(registry_mutex);
  std::vector<Piece> pieces;
  for (const auto& [start, piece] : registry()) pieces.push_back(piece);
  return pieces;
}

int FakeCuda::current() {
  return current_device;
}

std::size_t FakeCuda::objects() {
  return owners().count();
}

namespace ballast::device {
std::filesystem::path driver_root() {
  return test::FakeCuda::root;
}
}  // namespace ballast::device

cudaError_t cudaGetLastError() {
  const cudaError_t code = last_error;
  last_error = cudaSuccess;
  return code;
}
const char* cudaGetErrorString(cudaError_t) {
  return "a fake's error";
}
const char* cudaGetErrorName(cudaError_t) {
  return "cudaErrorFake";
}

std::string FakeCuda::connections_at_start() {
  static const std::string found = [] {
    const char* const value = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    return std::string(value == nullptr ? "" : value);
  }();
  return found;
}

cudaError_t cudaGetDeviceCount(int* count) {
  static_cast<void>(FakeCuda::connections_at_start());
  *count = 0;
  int driver = 0;
  cudaDriverGetVersion(&driver);
  if (driver / 1000 < CUDART_VERSION / 1000) return remembered(cudaErrorInsufficientDriver);
  if (const cudaError_t code = answer_to("cudaGetDeviceCount")) return code;
  if (!FakeCuda::has_gpus) return remembered(cudaErrorNoDevice);
  *count = kDevices;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  const int driver = FakeCuda::driver;
  *version = driver == FakeCuda::kSameVersion ? CUDART_VERSION : driver;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  static_cast<void>(FakeCuda::connections_at_start());
  if (const cudaError_t code = answer_to("cudaSetDevice")) return code;
  if (device < 0 || device >= kDevices) return remembered(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  if (const cudaError_t code = answer_to("cudaGetDevice")) return code;
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDeviceFlags(unsigned) {
  return answer_to("cudaSetDeviceFlags");
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (const cudaError_t code = answer_to("cudaGetDeviceProperties")) return code;
  *properties = {};
  std::strcpy(properties->name, "Fake GPU");
  const bool old = device == FakeCuda::old_gpu;
  const int capability = old ? FakeCuda::old_capability.load() : 90;
  properties->major = capability / 10;
  properties->minor = capability % 10;
  properties->totalGlobalMem = FakeCuda::memory;
  properties->multiProcessorCount = 132;
  properties->uuid.bytes[0] = static_cast<char>(1 + device);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* id, int size, int device) {
  if (const cudaError_t code = answer_to("cudaDeviceGetPCIBusId")) return code;
  std::snprintf(id, static_cast<std::size_t>(size), "FACE:%02X:00.0",
                static_cast<unsigned>(device));
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  if (const cudaError_t code = answer_to("cudaMemGetInfo")) return code;
  *total = FakeCuda::memory;
  *free = *total - std::min(*total, FakeMemory::taken() + FakeCuda::taken_by_libraries());
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) {
    return remembered(cudaErrorInvalidValue);
  }
  FakeCuda::await_shared_memory_of_others(++FakeCuda::shared_memory_calls);
  return static_cast<std::size_t>(value) > FakeCuda::most_shared_memory
             ? remembered(cudaErrorInvalidValue)
             : cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, std::size_t size) {
  *memory = nullptr;
  if (const cudaError_t code = answer_to_allocation("cudaMalloc")) return code;
  if (size <= FakeCuda::most_at_once &&
      size + FakeMemory::taken() + FakeCuda::taken_by_libraries() <= FakeCuda::memory) {
    *memory = FakeMemory::take(size, current_device);
  }
  return *memory == nullptr ? remembered(cudaErrorMemoryAllocation) : cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  const cudaError_t code = answer_to_allocation("cudaFree");
  if (code == cudaErrorNotPermitted) return code;
  expect_no_work("cudaFree");
  FakeMemory::give_back(memory);
  return code;
}
cudaError_t cudaMemset(void* memory, int value, std::size_t size) {
  return cudaMemsetAsync(memory, value, size, nullptr);
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t size, cudaMemcpyKind kind) {
  const cudaError_t code = cudaMemcpyAsync(to, from, size, kind, nullptr);
  await_stream(nullptr);
  return code;
}
cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t size, cudaStream_t stream) {
  if (const cudaError_t code = answer_to("cudaMemsetAsync", stream)) return code;
  if (!is_device_memory("cudaMemset", memory, size)) return remembered(cudaErrorInvalidValue);
  if (value != 0) return on_stream(stream, [=] { std::memset(memory, value, size); });
  return on_stream(
      stream, [=] { FakeMemory::zero(memory, size); }, memory);
}
cudaError_t cudaMallocHost(void** memory, std::size_t size) {
  *memory = nullptr;
  if (const cudaError_t code = answer_to_allocation("cudaMallocHost")) return code;
  *memory = std::malloc(size);
  if (*memory == nullptr) return remembered(cudaErrorMemoryAllocation);
  if (FakeCuda::seed != 0) std::memset(*memory, 0xff, size);
  ++FakeCuda::host_allocations;
  const std::scoped_lock lock(registry_mutex);
  host_pieces()[static_cast<std::byte*>(*memory)] = size;
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* memory) {
  const cudaError_t code = answer_to_allocation("cudaFreeHost");
  if (code == cudaErrorNotPermitted) return code;
  expect_no_work("cudaFreeHost");
  {
    const std::scoped_lock lock(registry_mutex);
    host_pieces().erase(static_cast<std::byte*>(memory));
  }
  std::free(memory);
  --FakeCuda::host_allocations;
  return code;
}
cudaError_t cudaHostRegister(void* memory, std::size_t size, unsigned) {
  if (const cudaError_t code = answer_to("cudaHostRegister")) return code;
  auto* start = static_cast<std::byte*>(memory);
  if (size == 0 || !mapped(start, size)) return remembered(cudaErrorInvalidValue);
  auto& left = FakeCuda::registrations_left;
  if (left >= 0 && left-- == 0) {
    left = 0;
    return remembered(static_cast<cudaError_t>(FakeCuda::registration_error.load()));
  }
  if (where(start, size) != Lies::outside) return remembered(cudaErrorHostMemoryAlreadyRegistered);
  if (auto* told = FakeCuda::told_of_registrations.load(); told != nullptr) *told = true;
  const std::scoped_lock lock(registry_mutex);
  registry()[start] = {start, size, current_device};
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* memory) {
  const cudaError_t code = answer_to("cudaHostUnregister");
  auto* start = static_cast<std::byte*>(memory);
  const std::scoped_lock lock(registry_mutex);
  const auto found = registry().find(start);
  if (found == registry().end() || !mapped(start, found->second.size)) {
    ++FakeCuda::refused_unregistrations;
    return remembered(cudaErrorHostMemoryNotRegistered);
  }
  registry().erase(found);
  return code;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t size, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  if (const cudaError_t code = answer_to("cudaMemcpyAsync", stream)) return code;
  const bool up = kind == cudaMemcpyHostToDevice;
  const void* host = up ? from : to;
  // CUDA documents this for partly registered ranges, and does not mention ranges in two
  // registrations.
  if (where(static_cast<const std::byte*>(host), size) == Lies::across) {
    return remembered(cudaErrorInvalidValue);
  }
  if (size > 0 && (!is_device_memory("cudaMemcpyAsync", up ? to : from, size) ||
                   !is_host_memory("cudaMemcpyAsync", host, size))) {
    return remembered(cudaErrorInvalidValue);
  }
  (up ? FakeCuda::copied_to_device : FakeCuda::copied_to_host) += size;
  if (size == 0) return cudaSuccess;  // then either may be null
  if (FakeCuda::seed == 0 || is_page_locked(host, size)) {
    return on_stream(stream, [=] { std::memcpy(to, from, size); });
  }
  if (up) {  // read by the call
    const auto* const bytes = static_cast<const std::byte*>(from);
    return on_stream(stream, [to, staged = std::vector<std::byte>(bytes, bytes + size)] {
      std::memcpy(to, staged.data(), staged.size());
    });
  }
  const cudaError_t code = on_stream(stream, [=] { std::memcpy(to, from, size); });
  await_stream(stream);
  return code;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  if (const cudaError_t code = answer_to("cudaDeviceCanAccessPeer")) return code;
  *can = FakeCuda::peers && device != peer ? 1 : 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  if (const cudaError_t code = answer_to("cudaDeviceEnablePeerAccess")) return code;
  return remembered(FakeCuda::enable_peer(current_device, peer));
}
cudaError_t cudaDeviceDisablePeerAccess(int peer) {
  if (const cudaError_t code = answer_to("cudaDeviceDisablePeerAccess")) return code;
  return remembered(FakeCuda::disable_peer(current_device, peer));
}
cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device,
                                std::size_t size, cudaStream_t stream) {
  constexpr const char* kCall = "cudaMemcpyPeerAsync";
  if (const cudaError_t code = answer_to(kCall, stream)) return code;
  if (!is_device_memory(kCall, to, size) || !is_device_memory(kCall, from, size)) {
    return remembered(cudaErrorInvalidValue);
  }
  if (!FakeMemory::is_on(to_device, to) || !FakeMemory::is_on(from_device, from)) {
    FakeCuda::complain(std::string(kCall) + ": memory of another GPU");
    return remembered(cudaErrorInvalidValue);
  }
  FakeCuda::copied_to_peers += size;
  if (FakeCuda::loses_copies(from_device, to_device)) return cudaSuccess;
  return on_stream(
      stream, [=] { std::memcpy(to, from, size); }, nullptr, 1U << to_device);
}
cudaError_t cudaDeviceSynchronize() {
  if (const cudaError_t code = answer_to("cudaDeviceSynchronize")) return code;
  await_all_streams();
  return FakeCuda::answer("");
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  if (const cudaError_t code = answer_to("cudaStreamCreateWithFlags")) return code;
  *stream = static_cast<cudaStream_t>(owners().make());
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const cudaError_t code = answer_to("cudaStreamDestroy", stream);
  if (FakeCuda::seed != 0) await_stream(stream);  // the handle may be given out again
  owners().end(stream);
  return code;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (const cudaError_t code = answer_to("cudaStreamSynchronize", stream)) return code;
  if (FakeCuda::seed != 0) await_stream(stream);
  return FakeCuda::answer("");
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (const cudaError_t code = answer_to("cudaStreamQuery", stream)) return code;
  return busy_or_done([=] { return is_idle(stream); });
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (const cudaError_t code = answer_to("cudaStreamWaitEvent", stream, event)) return code;
  wait_for_event(stream, event);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  if (const cudaError_t code = answer_to("cudaEventCreateWithFlags")) return code;
  *event = static_cast<cudaEvent_t>(owners().make());
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, 0);
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  if (const cudaError_t code = answer_to("cudaEventElapsedTime", begin, end)) return code;
  if (!is_over(begin) || !is_over(end)) return remembered(cudaErrorNotReady);
  const double from = time_of(begin);
  const double to = time_of(end);
  if (from < 0 || to < 0) return remembered(cudaErrorInvalidResourceHandle);
  *milliseconds = static_cast<float>(to - from);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const cudaError_t code = answer_to("cudaEventDestroy", event);
  forget_event(event);
  owners().end(event);
  return code;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (const cudaError_t code = answer_to("cudaEventRecord", event, stream)) return code;
  record_event(event, stream);
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (const cudaError_t code = answer_to("cudaEventQuery", event)) return code;
  return busy_or_done([=] { return is_over(event); });
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (const cudaError_t code = answer_to("cudaEventSynchronize", event)) return code;
  await_event(event);
  return FakeCuda::answer("");
}
