#pragma once

namespace ballast::model {

/// The kernels of the CUDA device. The sets differ in the bits of their results.
enum class KernelSet {
  best,  ///< the fastest for the GPU, with cuBLASLt's products
  /// Ballast's simplest kernels: no tensor cores, no asynchronous copies, no library. Ten to fifty
  /// times slower. For comparisons that find a wrong kernel, and for GPUs without cuBLASLt.
  plain,
};

/// Checks of the work of the CUDA device.
enum class GpuChecks {
  off,
  /// Waits for every kernel and library call, and searches the results of passes for values that
  /// are not finite. Errors name the kernel and its shape.
  each,
};

}  // namespace ballast::model
