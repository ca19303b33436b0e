#include "tests/support/fake_cuda.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>

#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <unistd.h>

#include "src/device/cuda/driver_files.h"

namespace {

constexpr int kDevices = 4;
constexpr std::size_t kMemory = std::size_t{1} << 33U;

thread_local cudaError_t last_error = cudaSuccess;
thread_local int current_device = 0;

/// The runtime keeps failures until they are queried.
cudaError_t remembered(cudaError_t code) {
  if (code != cudaSuccess) last_error = code;
  return code;
}

using ballast::test::FakeCuda;

std::mutex registry_mutex;
std::map<std::byte*, std::size_t>& registry() {
  static std::map<std::byte*, std::size_t> pieces;
  return pieces;
}

/// Returns whether the call may allocate or free memory now.
bool may_allocate() {
  if (!FakeCuda::NoAllocation::exists()) return true;
  ++FakeCuda::NoAllocation::refused;
  return false;
}

/// The result of a query of work that is done, unless it is to look busy.
cudaError_t busy_or_done() {
  auto& busy = FakeCuda::busy_queries;
  return busy > 0 && busy-- > 0 ? remembered(cudaErrorNotReady) : cudaSuccess;
}

/// How a range overlaps with the registered ranges.
enum class Lies { outside, in_one, across };

Lies where(const std::byte* start, std::size_t size) {
  const std::scoped_lock lock(registry_mutex);
  for (const auto& [piece, length] : registry()) {
    if (start >= piece + length || piece >= start + size) continue;
    return start >= piece && start + size <= piece + length ? Lies::in_one : Lies::across;
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

/// Notes a call whose stream or event belongs to another device than the current one. CUDA accepts
/// some of these calls, but starts the current device for them.
template <class... Objects>
cudaError_t on_device(Objects... objects) {
  if ((owners().own(objects) && ...)) return cudaSuccess;
  ++FakeCuda::wrong_device;
  return remembered(cudaErrorInvalidResourceHandle);
}

/// Times at which events were recorded.
class Times {
 public:
  void set(cudaEvent_t event, double time) {
    const std::scoped_lock lock(mutex_);
    times_[event] = time;
  }
  /// Returns nothing for an event that was never recorded.
  std::optional<double> of(cudaEvent_t event) {
    const std::scoped_lock lock(mutex_);
    const auto found = times_.find(event);
    return found == times_.end() ? std::nullopt : std::optional(found->second);
  }
  void forget(cudaEvent_t event) {
    const std::scoped_lock lock(mutex_);
    times_.erase(event);
  }

 private:
  std::mutex mutex_;
  std::map<cudaEvent_t, double> times_;
};
Times& times() {
  static auto* const kept = new Times;
  return *kept;
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
  for (const auto& [start, size] : registry()) pieces.push_back({start, size});
  return pieces;
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
  if (device < 0 || device >= kDevices) return remembered(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDeviceFlags(unsigned) {
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  *properties = {};
  std::strcpy(properties->name, "Fake GPU");
  const bool old = device == FakeCuda::old_gpu;
  const int capability = old ? FakeCuda::old_capability.load() : 90;
  properties->major = capability / 10;
  properties->minor = capability % 10;
  properties->totalGlobalMem = kMemory;
  properties->multiProcessorCount = 132;
  properties->uuid.bytes[0] = static_cast<char>(1 + device);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* id, int size, int device) {
  std::snprintf(id, static_cast<std::size_t>(size), "FACE:%02X:00.0",
                static_cast<unsigned>(device));
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  *free = *total = kMemory;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) {
    return remembered(cudaErrorInvalidValue);
  }
  ++FakeCuda::shared_memory_calls;
  return static_cast<std::size_t>(value) > FakeCuda::most_shared_memory
             ? remembered(cudaErrorInvalidValue)
             : cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, std::size_t size) {
  *memory = nullptr;
  if (!may_allocate()) return remembered(cudaErrorNotPermitted);
  *memory = size > ballast::test::FakeCuda::most_at_once ? nullptr : std::calloc(size, 1);
  return *memory == nullptr ? remembered(cudaErrorMemoryAllocation) : cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  if (!may_allocate()) return remembered(cudaErrorNotPermitted);
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* memory, int value, std::size_t size) {
  // The memory is zeroed already, and pages that are not touched cost nothing.
  if (value != 0) std::memset(memory, value, size);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t size, cudaMemcpyKind) {
  std::memcpy(to, from, size);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t size, cudaStream_t stream) {
  if (const cudaError_t code = on_device(stream); code != cudaSuccess) return code;
  std::memset(memory, value, size);
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void** memory, std::size_t size) {
  *memory = nullptr;
  if (!may_allocate()) return remembered(cudaErrorNotPermitted);
  *memory = std::malloc(size);
  if (*memory == nullptr) return remembered(cudaErrorMemoryAllocation);
  ++FakeCuda::host_allocations;
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* memory) {
  if (!may_allocate()) return remembered(cudaErrorNotPermitted);
  std::free(memory);
  --FakeCuda::host_allocations;
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* memory, std::size_t size, unsigned) {
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
  registry()[start] = size;
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* memory) {
  auto* start = static_cast<std::byte*>(memory);
  const std::scoped_lock lock(registry_mutex);
  const auto found = registry().find(start);
  if (found == registry().end() || !mapped(start, found->second)) {
    ++FakeCuda::refused_unregistrations;
    return remembered(cudaErrorHostMemoryNotRegistered);
  }
  registry().erase(found);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t size, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  if (const cudaError_t code = on_device(stream); code != cudaSuccess) return code;
  const bool up = kind == cudaMemcpyHostToDevice;
  const void* host = up ? from : to;
  // CUDA documents this for partly registered ranges, and does not mention ranges in two
  // registrations.
  if (where(static_cast<const std::byte*>(host), size) == Lies::across) {
    return remembered(cudaErrorInvalidValue);
  }
  if (size > 0) std::memcpy(to, from, size);  // otherwise either may be null
  (up ? FakeCuda::copied_to_device : FakeCuda::copied_to_host) += size;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = static_cast<cudaStream_t>(owners().make());
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const cudaError_t code = on_device(stream);
  owners().end(stream);
  return code;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return on_device(stream);
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  const cudaError_t code = on_device(stream);
  return code == cudaSuccess ? busy_or_done() : code;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  return on_device(stream, event);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = static_cast<cudaEvent_t>(owners().make());
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, 0);
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  if (const cudaError_t code = on_device(begin, end); code != cudaSuccess) return code;
  const auto from = times().of(begin);
  const auto to = times().of(end);
  if (!from || !to) return remembered(cudaErrorInvalidResourceHandle);
  *milliseconds = static_cast<float>(*to - *from);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const cudaError_t code = on_device(event);
  times().forget(event);
  owners().end(event);
  return code;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  times().set(event, FakeCuda::milliseconds);
  return on_device(event, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const cudaError_t code = on_device(event);
  return code == cudaSuccess ? busy_or_done() : code;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return on_device(event);
}
