#include "src/model/cuda/products/trials.h"

#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

namespace ballast::model::cuda {
namespace {

using device::check_cuda;

// A measurement takes much longer than a kernel launch, and the best of several is undisturbed.
constexpr int kRounds = 3;
constexpr int kRepetitions = 4;

using Event =
    std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, device::CudaEnd<cudaEventDestroy>>;

Event make_event() {
  cudaEvent_t made = nullptr;
  check_cuda(cudaEventCreate(&made), "creating an event that times products");
  return Event(made);
}

/// Times work on a stream.
class Stopwatch {
 public:
  explicit Stopwatch(cudaStream_t stream) : stream_(stream) {}

  template <class Work>
  float milliseconds(const Work& work) const {
    check_cuda(cudaEventRecord(begin_.get(), stream_), "timing products");
    work();
    check_cuda(cudaEventRecord(end_.get(), stream_), "timing products");
    check_cuda(cudaEventSynchronize(end_.get()), "products that are timed");
    float passed = 0.0F;
    check_cuda(cudaEventElapsedTime(&passed, begin_.get(), end_.get()), "timing products");
    return passed;
  }

 private:
  cudaStream_t stream_;
  Event begin_ = make_event();
  Event end_ = make_event();
};

}  // namespace

std::optional<std::size_t> fastest_way(cudaStream_t stream, std::size_t count,
                                       const std::function<bool(std::size_t)>& enqueue) {
  std::vector<std::size_t> usable;
  for (std::size_t way = 0; way < count; ++way) {
    if (enqueue(way)) usable.push_back(way);  // also loads its kernels
  }
  if (usable.empty()) return std::nullopt;
  const Stopwatch watch(stream);
  std::vector<float> best(count, std::numeric_limits<float>::infinity());
  for (int round = 0; round < kRounds; ++round) {
    for (const std::size_t way : usable) {
      const float took = watch.milliseconds([&] {
        for (int i = 0; i < kRepetitions; ++i) static_cast<void>(enqueue(way));
      });
      best[way] = std::min(best[way], took);
    }
  }
  const auto first =
      std::min_element(usable.begin(), usable.end(),
                       [&](std::size_t a, std::size_t b) { return best[a] < best[b]; });
  return *first;
}

TrialMemory take_trial_memory(Bytes bytes) {
  void* memory = nullptr;
  if (cudaMalloc(&memory, bytes) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return nullptr;
  }
  return TrialMemory(memory);
}

std::string current_gpu() {
  int ordinal = 0;
  cudaDeviceProp properties = {};
  check_cuda(cudaGetDevice(&ordinal), "finding the current GPU");
  check_cuda(cudaGetDeviceProperties(&properties, ordinal), "properties of the current GPU");
  return properties.name;
}

}  // namespace ballast::model::cuda
