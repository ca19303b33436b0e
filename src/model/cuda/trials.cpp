#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "ballast/core/clocks.h"
#include "ballast/core/dtype.h"
#include "ballast/core/error.h"
#include "ballast/core/random.h"
#include "ballast/device/streams.h"
#include "ballast/model/attention.h"

#include "src/device/cuda/runtime.h"
#include "src/model/compute/factories.h"
#include "src/model/cuda/attention/attention.h"
#include "src/model/cuda/products/products.h"

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

namespace ballast::model {

namespace cuda {
namespace {

using device::check_cuda;

thread_local ProductChecks* current = nullptr;

/// Rows at the start and at the end of a result.
constexpr std::size_t kRows = 64;

/// Makes `checks` those of this thread while it exists.
class Current {
 public:
  explicit Current(ProductChecks& checks) { current = &checks; }
  ~Current() { current = nullptr; }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
};

/// Copies rows of `width` bytes that are `step` bytes apart from device memory, next to each other.
std::vector<std::byte> fetch_rows(cudaStream_t stream, const void* from, std::size_t step,
                                  std::size_t width, std::size_t count) {
  std::vector<std::byte> bytes(width * count);
  for (std::size_t row = 0; row < count; ++row) {
    check_cuda(cudaMemcpyAsync(bytes.data() + row * width,
                               static_cast<const std::byte*>(from) + row * step, width,
                               cudaMemcpyDeviceToHost, stream),
               "fetching a product");
  }
  check_cuda(cudaStreamSynchronize(stream), "fetching a product");
  return bytes;
}

void add(std::span<const std::byte> found, std::span<const std::byte> expected, DType type,
         DifferenceSum& sum) {
  with_training_type(type, [&](auto value) {
    using T = decltype(value);
    const auto* const a = reinterpret_cast<const T*>(found.data());
    const auto* const b = reinterpret_cast<const T*>(expected.data());
    const auto widened = [](T one) -> double {
      if constexpr (kTypeOf<T> == DType::f32) {
        return one;
      } else {
        return to_float(one);
      }
    };
    for (std::size_t i = 0; i < found.size() / sizeof(T); ++i)
      sum.add(widened(a[i]), widened(b[i]));
  });
}

}  // namespace

ProductChecks* ProductChecks::of_this_thread() {
  return current;
}

std::vector<ProductChecks::Rows> ProductChecks::expect(cudaStream_t stream, const Extents& e,
                                                       const Matrix& a, const Matrix& b,
                                                       const Matrix& d, const Extras& extras) {
  const std::size_t flags = static_cast<std::size_t>(extras.addend != nullptr) |
                            static_cast<std::size_t>(extras.bias != nullptr) << 1U;
  if (!seen_.insert(product_key(e, a, b, d, flags)).second) return {};
  const std::size_t head = std::min(e.m, kRows);
  const std::size_t tail = std::min(e.m - head, kRows);
  std::vector<Rows> all;
  all.push_back({.first = 0, .count = head});
  if (tail > 0) all.push_back({.first = e.m - tail, .count = tail});
  const std::size_t width = e.n * size_of(d.type);
  for (Rows& rows : all) {
    rows.expected = take_trial_memory(rows.count * width);
    if (rows.expected == nullptr) continue;
    if (extras.addend != nullptr) {
      Matrix addend = d;
      addend.data = extras.addend;
      const std::vector<std::byte> part =
          fetch_rows(stream, from_element(addend, rows.first, 0).data, d.row_step * size_of(d.type),
                     width, rows.count);
      check_cuda(cudaMemcpyAsync(rows.expected.get(), part.data(), part.size(),
                                 cudaMemcpyHostToDevice, stream),
                 "copying an addend");
      check_cuda(cudaStreamSynchronize(stream), "copying an addend");
    }
    const Matrix to = {.data = rows.expected.get(), .type = d.type, .row_step = e.n};
    check_cuda(plain_product(stream, {rows.count, e.n, e.k}, from_element(a, rows.first, 0), b, to,
                             extras.addend == nullptr ? nullptr : to.data, extras.bias),
               "plain product");
  }
  return all;
}

void ProductChecks::compare(cudaStream_t stream, const Extents& e, const Matrix& d,
                            const std::vector<Rows>& rows, std::string name) {
  if (rows.empty()) return;
  ProductCheck check = {.product = std::move(name), .wide = d.type == DType::f32, .compared = true};
  DifferenceSum sum;
  const std::size_t width = e.n * size_of(d.type);
  for (const Rows& part : rows) {
    if (part.expected == nullptr) {
      check.compared = false;
      continue;
    }
    const auto found = fetch_rows(stream, from_element(d, part.first, 0).data,
                                  d.row_step * size_of(d.type), width, part.count);
    const auto expected = fetch_rows(stream, part.expected.get(), width, width, part.count);
    add(found, expected, d.type, sum);
  }
  check.difference = sum.result();
  all_.push_back(std::move(check));
}

}  // namespace cuda

std::vector<ProductCheck> check_products(const std::function<void()>& work) {
  cuda::ProductChecks checks;
  const cuda::Current current(checks);
  work();
  return checks.all();
}

}  // namespace ballast::model

namespace ballast::model::cuda {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kSmallest = 256;
constexpr std::size_t kLargest = 8192;
/// Seconds of products to enqueue before waiting, because waking a thread takes up to a
/// millisecond.
constexpr double kStretch = 0.02;
constexpr int kMaxAtOnce = 64;
constexpr Bytes kWorkspaceAlignment = 256;

/// Returns random words. As two bf16 or one fp32, each has magnitudes from 0.5 to 1.
std::vector<std::uint32_t> random_words() {
  std::vector<std::uint32_t> words(kMiB / sizeof(std::uint32_t));
  for (std::size_t i = 0; i < words.size(); ++i) {
    words[i] = (static_cast<std::uint32_t>(random_u64(1, i)) & 0x807f807fU) | 0x3f003f00U;
  }
  return words;
}

/// Device memory filled with random numbers, because a GPU multiplies constants faster (they need
/// less power). Null if there is not enough memory.
class FilledMemory {
 public:
  explicit FilledMemory(Bytes size) {
    void* made = nullptr;
    const cudaError_t code = cudaMalloc(&made, size);
    if (code == cudaErrorMemoryAllocation) {
      static_cast<void>(cudaGetLastError());
      return;
    }
    device::check_cuda(code, "allocating matrices");
    memory_.reset(made);
    const std::vector<std::uint32_t> words = random_words();
    const Bytes once = words.size() * sizeof(std::uint32_t);
    for (Bytes at = 0; at < size; at += once) {
      device::check_cuda(cudaMemcpy(static_cast<std::byte*>(made) + at, words.data(),
                                    std::min(once, size - at), cudaMemcpyHostToDevice),
                         "filling matrices");
    }
    // Copies run on the default stream, for which other streams do not wait.
    device::check_cuda(cudaDeviceSynchronize(), "filling matrices");
  }
  [[nodiscard]] std::byte* data() const { return static_cast<std::byte*>(memory_.get()); }

 private:
  std::unique_ptr<void, device::CudaEnd<cudaFree>> memory_;
};

/// Products of n x n matrices.
class Square {
 public:
  Square(Products& products, device::CudaStream& stream, DType type, std::size_t n)
      : products_(products),
        stream_(stream),
        type_(type),
        n_(n),
        size_(n * n * size_of(type)),
        memory_(kWorkspaceAlignment + Products::kWorkspace + 3 * size_) {}

  [[nodiscard]] bool has_memory() const { return memory_.data() != nullptr; }

  /// Returns the shortest time of one product, measured for about `seconds` after a warm-up.
  double fastest(double seconds) {
    products_.set_workspace(workspace());
    run(1);
    double best = run(1);
    for (const auto start = Clock::now(); seconds_since(start) < seconds;) {
      const double count = std::clamp(kStretch / std::max(best, 1e-9), 1.0, double{kMaxAtOnce});
      best = std::min(best, run(static_cast<int>(count)));
    }
    return best;
  }

 private:
  [[nodiscard]] std::byte* workspace() const {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
    return memory_.data() + (round_up(address, kWorkspaceAlignment) - address);
  }
  /// Returns the mean seconds per product over `count` products.
  double run(int count) {
    const auto at = [&](std::size_t i) {
      return Matrix{
          .data = workspace() + Products::kWorkspace + i * size_, .type = type_, .row_step = n_};
    };
    const auto start = Clock::now();
    for (int i = 0; i < count; ++i) {
      products_.multiply(stream_.native(), {n_, n_, n_}, at(0), at(1), at(2));
    }
    stream_.synchronize();
    return seconds_since(start) / count;
  }

  Products& products_;
  device::CudaStream& stream_;
  DType type_;
  std::size_t n_;
  Bytes size_;
  FilledMemory memory_;
};

}  // namespace

double measure_cuda_gemm_peak(device::Device& device, DType type, double seconds, KernelSet set) {
  const auto owned = device.make_stream("gemm peak");
  device::CudaStream& stream = device::as_cuda(*owned);
  static_cast<void>(stream.native());  // selects the device for the allocations below
  Products products(nullptr, set);
  double best = 0.0;
  const auto start = Clock::now();
  for (std::size_t n = kSmallest; n <= kLargest; n *= 2) {
    Square square(products, stream, type, n);
    if (!square.has_memory()) break;
    const double left = seconds - seconds_since(start);
    const double took = square.fastest(n == kLargest ? left : left / 8);
    const auto size = static_cast<double>(n);
    best = std::max(best, 2.0 * size * size * size / std::max(took, 1e-9));
    // The next size takes eight times as long and runs at least twice.
    if (2 * 8 * took > seconds - seconds_since(start)) break;
  }
  if (best == 0.0) {
    throw Error(ErrorCategory::memory, fmt::format("measuring matrix products: {} of device memory "
                                                   "are needed in addition to ballast.device_bytes",
                                                   format_bytes(Products::kWorkspace)));
  }
  return best;
}

}  // namespace ballast::model::cuda

namespace ballast::model {

namespace {

void require_kernels(const AttentionShape& s) {
  const bool counted = s.sequences > 0 && s.length > 0 && s.heads > 0 && s.kv_heads > 0;
  const bool sized = s.head_dim > 0 && s.head_dim % 8 == 0 && s.head_dim <= cuda::kWidestHead;
  if (counted && sized && s.heads % s.kv_heads == 0) return;
  throw Error(ErrorCategory::usage,
              fmt::format("attention needs head_dim to be a multiple of 8 up to {} and kv_heads to "
                          "divide heads",
                          cuda::kWidestHead));
}

class CudaAttentionTrial final : public AttentionTrial {
 public:
  CudaAttentionTrial(device::Device& device, const AttentionShape& shape)
      : device_(device), shape_(shape), stream_(device.make_stream("attention")) {
    const std::size_t results = shape_.tokens() * shape_.width();
    qkv_ = random(shape_.tokens() * shape_.row(), 1);
    gradient_ = random(results, 2);
    out_ = values(results);
    dqkv_ = values(shape_.tokens() * shape_.row());
    log_sums_ = view_as<float>(device.allocate(shape_.log_sums() * sizeof(float), "sums")).raw();
    scratch_ =
        device.allocate(cuda::attention_scratch_bytes(shape_, sizeof(Bf16)), "scratch").raw();
    workspace_ = device.allocate(cuda::FusedAttention::kWorkspace, "workspace").raw();
    static_cast<void>(native());  // selects the device for the plan
    try {
      fused_ = std::make_unique<cuda::FusedAttention>(shape_);
    } catch (const Error& error) {
      cudnn_refusal_ = error.what();
    }
  }

  std::string cudnn_refusal() const override { return cudnn_refusal_; }

  void run(AttentionPass pass, std::size_t count) override {
    for (std::size_t i = 0; i < count; ++i) enqueue(pass);
    stream_->synchronize();
  }

 private:
  [[nodiscard]] cudaStream_t native() const { return device::as_cuda(*stream_).native(); }

  void enqueue(AttentionPass pass) {
    if (pass == AttentionPass::cudnn_forward) {
      expects(fused_ != nullptr, "cuDNN attention is not available");
      return fused_->forward(native(), qkv_, out_, log_sums_, workspace_);
    }
    if (pass == AttentionPass::own_forward) {
      return device::check_cuda(cuda::attention<Bf16>(native(), shape_, qkv_, out_, log_sums_),
                                "attention");
    }
    device::check_cuda(cuda::attention_backward<Bf16>(native(), shape_, qkv_, out_, log_sums_,
                                                      gradient_, dqkv_, scratch_),
                       "gradient of attention");
  }

  Bf16* values(std::size_t count) {
    return view_as<Bf16>(device_.allocate(count * sizeof(Bf16), "attention")).raw();
  }
  /// Random numbers, uniform between -1 and 1.
  Bf16* random(std::size_t count, std::uint64_t seed) {
    std::vector<Bf16> made(count);
    for (std::size_t i = 0; i < count; ++i) {
      made[i] =
          to_bf16(static_cast<float>(static_cast<std::int64_t>(random_u64(seed, i))) * 0x1p-63F);
    }
    const DeviceBytes bytes = device_.allocate(count * sizeof(Bf16), "attention");
    device_.copy_to_device(*stream_, bytes, std::as_bytes(std::span(made)));
    stream_->synchronize();
    return view_as<Bf16>(bytes).raw();
  }

  device::Device& device_;
  AttentionShape shape_;
  std::unique_ptr<device::Stream> stream_;
  Bf16* qkv_ = nullptr;
  Bf16* gradient_ = nullptr;
  Bf16* out_ = nullptr;
  Bf16* dqkv_ = nullptr;
  float* log_sums_ = nullptr;
  std::byte* scratch_ = nullptr;
  std::byte* workspace_ = nullptr;
  std::unique_ptr<cuda::FusedAttention> fused_;
  std::string cudnn_refusal_;
};

}  // namespace

Bytes attention_trial_bytes(const AttentionShape& shape) {
  require_kernels(shape);
  const Bytes values = 2 * shape.tokens() * (shape.row() + shape.width()) * sizeof(Bf16);
  const Bytes others = shape.log_sums() * sizeof(float) +
                       cuda::attention_scratch_bytes(shape, sizeof(Bf16)) +
                       cuda::FusedAttention::kWorkspace;
  return values + others + 7 * kPage;  // seven allocations, each rounded up
}

std::unique_ptr<AttentionTrial> make_attention_trial(device::Device& device,
                                                     const AttentionShape& shape) {
  require_kernels(shape);
  return std::make_unique<CudaAttentionTrial>(device, shape);
}

}  // namespace ballast::model
