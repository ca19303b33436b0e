#include <cstdint>
#include <cstring>
#include <memory>
#include <string>

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/device/device.h"
#include "ballast/device/streams.h"

#include "src/device/cuda/runtime.h"
#include "src/device/implementations.h"

namespace ballast::device {

namespace {

/// Oldest compute capabilities, times ten: for any training, and for training in bf16, which needs
/// the instructions of tensor_core.h.
constexpr int kOldest = 75;
constexpr int kOldestWithBf16 = 80;

/// Returns the oldest driver for programs of a major version of CUDA. Source: CUDA release notes,
/// "CUDA toolkit and minimum required driver version for CUDA minor version compatibility".
constexpr int oldest_driver(int cuda_major) {
  return cuda_major <= 12 ? 525 : 580;
}
constexpr int kCudaMajor = CUDART_VERSION / 1000;

/// Advises on a driver that supports programs up to CUDA `supported` (12020 is CUDA 12.2).
std::string driver_advice(int supported) {
  std::string text = fmt::format("update the driver to {} or newer", oldest_driver(kCudaMajor));
  if (kCudaMajor <= 12) return text;
  if (supported / 1000 >= 12) return text + ", or use the bundle of this program for CUDA 12";
  return text +
         fmt::format(" (the bundle of this program for CUDA 12 needs {})", oldest_driver(12));
}

/// Returns the CUDA version that the driver supports, 13000 for CUDA 13.0; 0 without a driver.
int supported_cuda() {
  int version = 0;
  if (cudaDriverGetVersion(&version) != cudaSuccess) static_cast<void>(cudaGetLastError());
  return version;
}

/// Explains why the runtime reports no devices.
std::string driver_refusal(cudaError_t code) {
  static_cast<void>(cudaGetLastError());
  const int supported = supported_cuda();
  if (supported == 0) {
    return has_gpu_file()
               ? "the library of the NVIDIA driver (libcuda.so.1) is not installed; in a "
                 "container, start it with the GPU (docker run --gpus all)"
               : "there is no NVIDIA driver on this machine";
  }
  if (code == cudaErrorNoDevice) return "the NVIDIA driver reports no GPU to this process";
  if (code == cudaErrorInsufficientDriver) {
    const std::string version = driver_version();
    return fmt::format("the NVIDIA driver{} supports CUDA {}, and this program needs CUDA {}: {}",
                       version.empty() ? "" : " " + version, cuda_version_text(supported),
                       cuda_version_text(CUDART_VERSION), driver_advice(supported));
  }
  return fmt::format("CUDA: {} ({})", cudaGetErrorString(code), cudaGetErrorName(code));
}

/// Assigns the GPUs of this machine to its processes in turn.
int ordinal_of(std::uint32_t local_rank) {
  raise_connections();
  int count = 0;
  check_cuda(cudaGetDeviceCount(&count), "counting CUDA devices");
  return static_cast<int>(local_rank % static_cast<std::uint32_t>(count));
}

cudaDeviceProp properties_of(int ordinal) {
  cudaDeviceProp properties = {};
  check_cuda(cudaGetDeviceProperties(&properties, ordinal),
             fmt::format("querying the properties of CUDA device {}", ordinal));
  return properties;
}

int capability_of(const cudaDeviceProp& properties) {
  return 10 * properties.major + properties.minor;
}

/// Returns why kernels for training in `type` cannot run on a GPU with these properties, or "".
std::string age_refusal(int ordinal, const cudaDeviceProp& properties, DType type) {
  const int capability = capability_of(properties);
  if (capability >= (type == DType::bf16 ? kOldestWithBf16 : kOldest)) return "";
  return fmt::format("CUDA device {}, {}, has compute capability {}.{} and so no bf16; {}", ordinal,
                     properties.name, properties.major, properties.minor,
                     capability >= kOldest ? "enable fp16 instead (fp16.enabled) to train on it"
                                           : "the oldest that trains has 7.5");
}

std::string name_of(const cudaDeviceProp& properties) {
  return fmt::format("{}, {}", properties.name, format_bytes(properties.totalGlobalMem));
}

/// Zeroed device memory for the whole budget.
class Arena {
 public:
  Arena(int ordinal, Bytes budget) {
    // Waiting threads sleep, because the CPU update needs the cores.
    select_gpu(ordinal);
    check_cuda(cudaSetDeviceFlags(cudaDeviceScheduleBlockingSync),
               "setting the wait mode of threads");
    // CUDA guarantees an alignment of only 256 bytes.
    const Bytes size = round_up(budget, kPage) + kPage;
    refuse_beyond_free(ordinal, budget, size);
    void* start = nullptr;
    check_cuda(cudaMalloc(&start, size),
               fmt::format("memory of CUDA device {} (ballast.device_bytes): allocating {}",
                           ordinal, format_bytes(size)));
    memory_.reset(start);
    check_cuda(cudaMemset(start, 0, size), "zeroing device memory");
    // The memset runs on the default stream, for which other streams do not wait.
    check_cuda(cudaDeviceSynchronize(), "zeroing device memory");
    const auto address = reinterpret_cast<std::uintptr_t>(start);
    pages_ = {static_cast<std::byte*>(start) + (round_up(address, kPage) - address),
              round_up(budget, kPage)};
  }

  [[nodiscard]] DeviceBytes pages() const { return pages_; }

 private:
  static void refuse_beyond_free(int ordinal, Bytes budget, Bytes size) {
    if (budget == 0) throw Error(ErrorCategory::memory, "ballast.device_bytes is 0; raise it");
    std::size_t free = 0;
    std::size_t total = 0;
    check_cuda(cudaMemGetInfo(&free, &total), "querying free device memory");
    if (size <= free) return;
    throw Error(
        ErrorCategory::memory,
        fmt::format("memory of CUDA device {} (ballast.device_bytes): {} requested, but "
                    "only {} of {} are free; lower ballast.device_bytes",
                    ordinal, format_bytes(budget), format_bytes(free), format_bytes(total)));
  }

  std::unique_ptr<void, CudaEnd<cudaFree>> memory_;
  DeviceBytes pages_;
};

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(const DeviceOptions& options)
      : ordinal_(ordinal_of(options.local_rank)),
        interrupted_(options.interrupted),
        properties_(properties_of(ordinal_)),
        arena_(ordinal_, options.budget),
        memory_(arena_.pages()) {
    log_compilation(properties_.name, capability_of(properties_));
  }

  std::string_view kind() const override { return "cuda"; }
  std::string description() const override {
    return fmt::format("CUDA device {}, {}", ordinal_, name_of(properties_));
  }

  DeviceBytes allocate(Bytes bytes, std::string_view what) override {
    return memory_.take(bytes, what);
  }
  Bytes budget() const override { return memory_.budget(); }
  Bytes allocated() const override { return memory_.taken(); }

  std::unique_ptr<Stream> make_stream(std::string_view name) override {
    return make_cuda_stream(ordinal_, name);
  }
  std::unique_ptr<Event> make_event() override { return make_cuda_event(ordinal_); }

  std::unique_ptr<Pin> pin(HostBytes memory, std::string_view setting) override {
    return make_cuda_pin(ordinal_, memory, setting, interrupted_);
  }

  void copy_to_device(Stream& stream, DeviceBytes to, ConstHostBytes from) override {
    expects(to.size() == from.size(), "copy_to_device: sizes differ");
    copy(stream, to.raw(), from.data(), from.size(), cudaMemcpyHostToDevice);
  }
  void copy_to_host(Stream& stream, HostBytes to, ConstDeviceBytes from) override {
    expects(to.size() == from.size(), "copy_to_host: sizes differ");
    copy(stream, to.data(), from.raw(), from.size(), cudaMemcpyDeviceToHost);
  }

  bool connect(Device& other) override {
    const int peer = number_of(other);
    return peer == ordinal_ || enable_peer_access(ordinal_, peer);
  }
  void copy_to_other(Stream& stream, Device& other, DeviceBytes to,
                     ConstDeviceBytes from) override {
    expects(to.size() == from.size(), "copy_to_other: sizes differ");
    const int peer = number_of(other);
    const cudaError_t code = cudaMemcpyPeerAsync(to.raw(), peer, from.raw(), ordinal_, from.size(),
                                                 as_cuda(stream).native());
    if (code != cudaSuccess) {
      check_cuda(code, fmt::format("copying {} from CUDA device {} to {}",
                                   format_bytes(from.size()), ordinal_, peer));
    }
  }

 private:
  static int number_of(Device& device) {
    const auto* cuda = dynamic_cast<CudaDevice*>(&device);
    expects(cuda != nullptr, "the CUDA device cannot copy to a device of another kind");
    return cuda->ordinal_;
  }
  static void copy(Stream& stream, std::byte* to, const std::byte* from, Bytes bytes,
                   cudaMemcpyKind kind) {
    const bool up = kind == cudaMemcpyHostToDevice;
    const cudaStream_t queue = as_cuda(stream).native();
    Bytes done = 0;
    while (done < bytes) {
      const Bytes size = pinned_part(up ? from + done : to + done, bytes - done);
      const cudaError_t code = cudaMemcpyAsync(to + done, from + done, size, kind, queue);
      if (code != cudaSuccess) {
        check_cuda(code,
                   fmt::format("copying {} {} the device", format_bytes(size), up ? "to" : "from"));
      }
      done += size;
    }
  }

  int ordinal_;
  const std::atomic<bool>* interrupted_;
  cudaDeviceProp properties_;
  Arena arena_;
  DeviceMemory memory_;
};

}  // namespace

bool cuda_built_in() {
  return true;
}

std::string cuda_requirement() {
  return fmt::format("CUDA {}, for drivers from {} on", cuda_version_text(CUDART_VERSION),
                     oldest_driver(kCudaMajor));
}

std::string cuda_refusal() {
  raise_connections();
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  if (code != cudaSuccess) return driver_refusal(code);
  return count > 0 ? "" : driver_refusal(cudaErrorNoDevice);
}

std::uint32_t count_gpus() {
  raise_connections();
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return static_cast<std::uint32_t>(count);
  static_cast<void>(cudaGetLastError());
  return 0;
}

bool has_gpu() {
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  if (code == cudaSuccess) return count > 0;
  static_cast<void>(cudaGetLastError());
  return code != cudaErrorNoDevice && has_gpu_file();
}

bool gpu_is_outdated(const DeviceOptions& options) {
  try {
    return capability_of(properties_of(ordinal_of(options.local_rank))) < kOldest;
  } catch (const Error&) {
    return false;
  }
}

std::string unsuitable_gpu(const DeviceOptions& options) {
  try {
    const int ordinal = ordinal_of(options.local_rank);
    return age_refusal(ordinal, properties_of(ordinal), options.type);
  } catch (const Error& error) {
    return error.what();
  }
}

Bytes free_cuda_memory(const DeviceOptions& options) {
  const int ordinal = ordinal_of(options.local_rank);
  select_gpu(ordinal);
  std::size_t free = 0;
  std::size_t total = 0;
  check_cuda(cudaMemGetInfo(&free, &total), "querying free device memory");
  return free;
}

std::string cuda_name(const DeviceOptions& options) {
  return name_of(properties_of(ordinal_of(options.local_rank)));
}

std::unique_ptr<Device> make_cuda_device(const DeviceOptions& options) {
  return std::make_unique<CudaDevice>(options);
}

namespace {

/// Copies in one direction, on a separate stream, between buffers allocated by CUDA.
class OneWay {
 public:
  OneWay(Device& device, Bytes bytes, cudaMemcpyKind kind)
      : bytes_(bytes), kind_(kind), stream_(device.make_stream("plain")) {
    as_cuda(*stream_).native();  // makes the device the current one
    void* memory = nullptr;
    check_cuda(cudaMallocHost(&memory, bytes),
               fmt::format("plain copies: allocating {} of pinned memory", format_bytes(bytes)));
    host_.reset(memory);
    std::memset(memory, 1, bytes);
    check_cuda(cudaMalloc(&memory, bytes),
               fmt::format("plain copies: allocating {} of device memory", format_bytes(bytes)));
    device_.reset(memory);
  }

  void enqueue() {
    const bool up = kind_ == cudaMemcpyHostToDevice;
    void* const to = up ? device_.get() : host_.get();
    const void* const from = up ? host_.get() : device_.get();
    check_cuda(cudaMemcpyAsync(to, from, bytes_, kind_, as_cuda(*stream_).native()), "plain copy");
  }
  void wait() { stream_->synchronize(); }

 private:
  Bytes bytes_;
  cudaMemcpyKind kind_;
  std::unique_ptr<void, CudaEnd<cudaFreeHost>> host_;
  std::unique_ptr<void, CudaEnd<cudaFree>> device_;
  std::unique_ptr<Stream> stream_;  ///< destroyed, and so synchronized, before the memory
};

class CudaPlainCopies final : public PlainCopies {
 public:
  CudaPlainCopies(Device& device, Bytes bytes)
      : up_(device, bytes, cudaMemcpyHostToDevice), down_(device, bytes, cudaMemcpyDeviceToHost) {}

  void run(CopyWay way, std::size_t count) override {
    for (std::size_t i = 0; i < count; ++i) {
      if (way != CopyWay::down) up_.enqueue();
      if (way != CopyWay::up) down_.enqueue();
    }
    if (way != CopyWay::down) up_.wait();
    if (way != CopyWay::up) down_.wait();
  }

 private:
  OneWay up_;
  OneWay down_;
};

}  // namespace

std::unique_ptr<PlainCopies> make_cuda_plain_copies(Device& device, Bytes bytes) {
  return std::make_unique<CudaPlainCopies>(device, bytes);
}

}  // namespace ballast::device
