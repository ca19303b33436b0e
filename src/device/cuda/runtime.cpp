#include "src/device/cuda/runtime.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/core/threads.h"

#include "src/device/cuda/shared_memory.h"

namespace ballast::device {

void raise_connections() {
  // Once, because other threads may read the environment later.
  static const int done = setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*replace=*/0);
  static_cast<void>(done);
}

namespace {

/// Returns whether a kernel caused the error while it ran. Every later call then returns it.
bool is_kernel_fault(cudaError_t code) {
  switch (code) {
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorIllegalInstruction:
    case cudaErrorInvalidPc:
    case cudaErrorHardwareStackError:
    case cudaErrorAssert:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
      return true;
    default:
      return false;
  }
}

std::atomic<int> awaiting = 0;

}  // namespace

WorkIsAwaited::WorkIsAwaited() {
  ++awaiting;
}
WorkIsAwaited::~WorkIsAwaited() {
  --awaiting;
}

std::string_view fault_advice() {
  return awaiting > 0 ? ""
                      : "; a kernel of this or another operation failed: to find it, repeat with "
                        "ballast.gpu_checks=each";
}

void check_cuda(cudaError_t code, std::string_view operation) {
  if (code == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());
  throw Error(ErrorCategory::device,
              fmt::format("{}: CUDA: {} ({}){}", operation, cudaGetErrorString(code),
                          cudaGetErrorName(code), is_kernel_fault(code) ? fault_advice() : ""));
}

namespace {

/// The limit of a kernel on a device.
struct SharedMemoryLimit {
  std::mutex mutex;
  std::size_t bytes = 0;
};

SharedMemoryLimit& allowed_to(const void* kernel, int ordinal) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, SharedMemoryLimit> all;
  const std::scoped_lock lock(mutex);
  return all[{kernel, ordinal}];
}

}  // namespace

cudaError_t allow_shared_memory(const void* kernel, std::size_t bytes) {
  if (bytes <= kFreelyShared) return cudaSuccess;
  int ordinal = 0;
  if (const cudaError_t code = cudaGetDevice(&ordinal); code != cudaSuccess) return code;
  SharedMemoryLimit& allowed = allowed_to(kernel, ordinal);
  // The call may load the kernel and wait for its device. Launches on other devices do not wait.
  const std::scoped_lock lock(allowed.mutex);
  if (bytes <= allowed.bytes) return cudaSuccess;
  const cudaError_t code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                static_cast<int>(bytes));
  if (code == cudaSuccess) allowed.bytes = bytes;
  return code;
}

namespace {

using StreamHandle =
    std::unique_ptr<std::remove_pointer_t<cudaStream_t>, CudaEnd<cudaStreamDestroy>>;
using EventHandle = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, CudaEnd<cudaEventDestroy>>;

/// Repeats `query` until it returns something else than cudaErrorNotReady, and returns that. Calls
/// the watches after each query, and rethrows their exceptions.
template <class Query>
cudaError_t poll_watching(const CudaStream::Watches& watches, const Query& query) {
  Polling polling(Polling::Worker::device);
  while (true) {
    const cudaError_t state = query();
    // Watches come first, because they describe a failed collective better than the device does.
    for (const auto& [owner, watch] : watches) watch(polling.seconds());
    if (state != cudaErrorNotReady) return state;
    static_cast<void>(cudaGetLastError());  // clears cudaErrorNotReady
    polling.pause();
  }
}

class OwnedStream final : public CudaStream {
 public:
  OwnedStream(int ordinal, std::string_view name)
      : ordinal_(ordinal), work_(fmt::format("work on stream {}", name)) {
    select_gpu(ordinal_);
    cudaStream_t made = nullptr;
    check_cuda(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking),
               fmt::format("creating stream {}", name));
    stream_.reset(made);
  }
  /// Waits, because host buffers of pending copies may be freed next. Drops the verdicts, because
  /// the objects they use may already be destroyed.
  ~OwnedStream() override {
    try {
      static_cast<void>(take_verdicts());
      synchronize();
    } catch (const Error&) {
      // A destructor must not throw.
    }
  }

  cudaStream_t native() override {
    select_gpu(ordinal_);
    return stream_.get();
  }
  void set_watch(const void* owner, Watch watch) override {
    const std::scoped_lock lock(mutex_);
    watches_[owner] = std::move(watch);
  }
  Watches take_watches() override {
    const std::scoped_lock lock(mutex_);
    return std::exchange(watches_, {});
  }
  void add_verdict(Verdict verdict) override {
    const std::scoped_lock lock(mutex_);
    verdicts_.push_back(std::move(verdict));
  }
  std::vector<Verdict> take_verdicts() override {
    const std::scoped_lock lock(mutex_);
    return std::exchange(verdicts_, {});
  }
  void synchronize() override {
    const Watches watches = take_watches();
    const std::vector<Verdict> verdicts = take_verdicts();
    const cudaStream_t stream = native();
    check_cuda(watches.empty()
                   ? cudaStreamSynchronize(stream)
                   : poll_watching(watches, [stream] { return cudaStreamQuery(stream); }),
               work_);
    for (const Verdict& verdict : verdicts) verdict();
  }

 private:
  int ordinal_;
  std::string work_;  ///< for messages
  StreamHandle stream_;
  std::mutex mutex_;
  Watches watches_;
  std::vector<Verdict> verdicts_;
};

class CudaEvent final : public Event {
 public:
  explicit CudaEvent(int ordinal) : ordinal_(ordinal) {
    select_gpu(ordinal_);
    cudaEvent_t made = nullptr;
    // Waiting threads sleep, because the CPU update needs the cores.
    check_cuda(cudaEventCreateWithFlags(&made, cudaEventDisableTiming | cudaEventBlockingSync),
               "creating an event");
    event_.reset(made);
  }
  ~CudaEvent() override {
    // On a thread that has not used a GPU yet, CUDA would start the first one.
    static_cast<void>(cudaSetDevice(ordinal_));
  }

  void record(Stream& stream) override {
    CudaStream& cuda = as_cuda(stream);
    check_cuda(cudaEventRecord(event_.get(), cuda.native()), "recording an event");
    for (auto& [owner, watch] : cuda.take_watches()) watches_[owner] = std::move(watch);
    for (auto& verdict : cuda.take_verdicts()) verdicts_.push_back(std::move(verdict));
  }
  void wait_on(Stream& stream) override {
    check_cuda(cudaStreamWaitEvent(as_cuda(stream).native(), event_.get(), 0),
               "making a stream wait for an event");
  }
  void synchronize() override {
    select_gpu(ordinal_);
    const CudaStream::Watches watches = std::exchange(watches_, {});
    const cudaEvent_t event = event_.get();
    check_cuda(watches.empty() ? cudaEventSynchronize(event)
                               : poll_watching(watches, [event] { return cudaEventQuery(event); }),
               "work before an event");
    for (const auto& verdict : std::exchange(verdicts_, {})) verdict();
  }

 private:
  int ordinal_;
  EventHandle event_;
  CudaStream::Watches watches_;
  std::vector<CudaStream::Verdict> verdicts_;
};

}  // namespace

void select_gpu(int ordinal) {
  const cudaError_t code = cudaSetDevice(ordinal);
  if (code != cudaSuccess) check_cuda(code, fmt::format("selecting CUDA device {}", ordinal));
}

CudaStream& as_cuda(Stream& stream) {
  auto* cuda = dynamic_cast<CudaStream*>(&stream);
  expects(cuda != nullptr, "the CUDA device was given a stream of another device");
  return *cuda;
}

std::unique_ptr<CudaStream> make_cuda_stream(int ordinal, std::string_view name) {
  return std::make_unique<OwnedStream>(ordinal, name);
}

std::unique_ptr<Event> make_cuda_event(int ordinal) {
  return std::make_unique<CudaEvent>(ordinal);
}

}  // namespace ballast::device
