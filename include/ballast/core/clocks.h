#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace ballast {

inline double seconds_between(std::chrono::steady_clock::time_point start,
                              std::chrono::steady_clock::time_point end) {
  return std::chrono::duration<double>(end - start).count();
}
inline double seconds_since(std::chrono::steady_clock::time_point start) {
  return seconds_between(start, std::chrono::steady_clock::now());
}

/// CPU time of all threads of this process so far.
double process_cpu_seconds();
/// CPU time of the calling thread so far.
double thread_cpu_seconds();

/// The `share` quantile (0 to 1) of measured `values` by the nearest rank; 0 if `values` is empty.
template <class T>
double quantile(std::vector<T> values, double share) {
  if (values.empty()) return 0.0;
  const double rank = std::max(1.0, std::ceil(share * static_cast<double>(values.size())));
  const auto at = values.begin() + static_cast<std::ptrdiff_t>(rank) - 1;
  std::nth_element(values.begin(), at, values.end());
  return static_cast<double>(*at);
}

/// Groups of kernels of the host device. Kernels inside another one's span belong to the inner
/// group.
enum class KernelGroup : std::uint8_t {
  product,        ///< one matrix product; products inside attention and delta rules are theirs
  widening,       ///< copies of 16-bit operands in fp32, for CPUs without 16-bit products
  attention,      ///< with its products
  delta_rule,     ///< convolution, recurrence with its products, gated norm
  norm,           ///< with the sums of its weights' gradients
  rotary,         ///< with the tables of angles
  activation,     ///< activations and gates
  cross_entropy,  ///< sums over logits and their gradients
  embedding,
  experts,      ///< routing, dispatch and combine
  elementwise,  ///< copies, sums of bias gradients, scaling, clearing
  packing,      ///< gradients to the training type, with their norm
  pass,         ///< a pass of a block, outside its kernels
  update,       ///< the optimizer
};
inline constexpr std::size_t kKernelGroups = 14;
std::string_view to_string(KernelGroup group);

using KernelTime = std::chrono::steady_clock::time_point;

/// One call of a kernel.
struct KernelSpan {
  KernelGroup group = KernelGroup::pass;
  std::array<std::size_t, 3> extents = {};  ///< M, N and K of a product, otherwise 0
  KernelTime start;
  KernelTime end;
};

/// Records the kernels of all host devices of the process during its lifetime. Only one may exist
/// at a time.
class KernelRecording {
 public:
  KernelRecording();
  ~KernelRecording();
  KernelRecording(const KernelRecording&) = delete;
  KernelRecording& operator=(const KernelRecording&) = delete;

  /// Returns the spans that have ended, in any order, and removes them from the recording.
  std::vector<KernelSpan> take();
};

/// Measures a kernel from construction to destruction while a KernelRecording exists. Otherwise it
/// costs one load of a flag. It belongs on the thread that calls the kernel, not on its team.
class KernelClock {
 public:
  explicit KernelClock(KernelGroup group, std::array<std::size_t, 3> extents = {}) {
    if (!is_recording.load(std::memory_order_relaxed)) return;
    span_ = {group, extents, std::chrono::steady_clock::now(), {}};
  }
  ~KernelClock() {
    if (span_.start != KernelTime()) add(span_);
  }
  KernelClock(const KernelClock&) = delete;
  KernelClock& operator=(const KernelClock&) = delete;

 private:
  friend class KernelRecording;
  static void add(KernelSpan span);

  static inline std::atomic<bool> is_recording = false;
  KernelSpan span_;
};

}  // namespace ballast
