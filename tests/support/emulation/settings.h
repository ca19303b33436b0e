#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include <cuda_runtime_api.h>

namespace ballast::test::emulation {

struct Dim3;

/// Choices that a GPU leaves open and that the emulation makes at random, deterministically for
/// each seed. Seeds of 0 choose what is easiest to emulate: asynchronous work happens when it is
/// awaited, and arithmetic is that of the host.
struct Seeds {
  /// When asynchronous copies and products of warpgroups happen: at once, when they are awaited, or
  /// in between; and the order of threads and blocks of Order::shuffled.
  std::uint64_t timing = 0;
  /// Results of approximate functions within their documented errors, and the order and rounding of
  /// the sums of tensor cores (approximate.h). Equal arguments give equal results.
  std::uint64_t arithmetic = 0;
};

/// Seeds of all later grids in this process. The environment variable BALLAST_EMULATION_SEED sets
/// the first ones: a number for both seeds, or "timing=NUMBER" or "arithmetic=NUMBER".
inline Seeds seeds();
void set_seeds(const Seeds& seeds);

/// Compute capability of the emulated GPU, times ten: 75, 80, 86, 89 (the default) or 90. It
/// decides which instructions exist and how much shared memory a block may have. The environment
/// variable BALLAST_EMULATION_GPU sets the first one.
inline unsigned capability();
void set_capability(unsigned times_ten);

/// Whether the emulated GPU multiplies matrices by warpgroups (warpgroup.h). `set` chooses the GPU
/// with compute capability 9.0, or the default one.
bool has_warpgroup_products();
void set_warpgroup_products(bool has);

/// Shared memory of a block, dynamic and static, in bytes. Source: NVIDIA, "CUDA C++ Programming
/// Guide", table of technical specifications per compute capability.
std::size_t most_shared_memory();

/// Returns what a GPU returns for such a launch. Refusals also print a line that names the kernel.
/// `kernel`: its address; `arguments`: their bytes.
cudaError_t check_launch(const void* kernel, const Dim3& blocks, unsigned threads,
                         std::size_t shared_bytes, std::size_t arguments);

/// Maximum of threads per block in a kernel's launch bounds, or 0 if it has none or the compiler
/// does not keep it (gcc does).
unsigned launch_bound(const void* kernel);

/// Name of the function that contains an address, with its namespaces and template arguments.
std::string function_name(const void* address);

namespace settings {
extern std::atomic<std::uint64_t> timing;
extern std::atomic<std::uint64_t> arithmetic;
extern std::atomic<unsigned> gpu;
}  // namespace settings

inline Seeds seeds() {
  return {.timing = settings::timing.load(std::memory_order_relaxed),
          .arithmetic = settings::arithmetic.load(std::memory_order_relaxed)};
}
inline unsigned capability() {
  return settings::gpu.load(std::memory_order_relaxed);
}

}  // namespace ballast::test::emulation
