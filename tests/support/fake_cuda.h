#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>

namespace ballast::test {

/// Controls fake_cuda.cpp, which replaces the CUDA runtime at link time: device memory is host
/// memory, and work is done when it is enqueued. This tests Ballast's use of CUDA without a GPU,
/// but not CUDA itself.
///
/// With a seed the fake is as strict as a GPU. Streams are queues whose work runs early, late or
/// between (fake_stream.h). Only work may touch device memory (fake_memory.h). Copies in a wrong
/// direction, pointers and extents that are not in one allocation, and allocations that are freed
/// while work is pending are errors. Complaints name what no error code describes.
struct FakeCuda {
  /// Chooses when work runs; 0: at once. At first the value of the environment variable
  /// BALLAST_FAKE_SEED. Change it only while no work is pending and no device memory is allocated.
  static inline std::atomic<std::uint64_t> seed = [] {
    const char* const value = std::getenv("BALLAST_FAKE_SEED");
    return value == nullptr ? std::uint64_t{0} : std::strtoull(value, nullptr, 10);
  }();

  /// Ends the process with a message, or keeps the message if a test expects it.
  static void complain(const std::string& what);
  /// Collects complaints while it exists. One at a time.
  class Complaints {
   public:
    Complaints();
    ~Complaints();
    Complaints(const Complaints&) = delete;
    Complaints& operator=(const Complaints&) = delete;
    [[nodiscard]] std::string text() const;
  };

  /// Refuses one call of a function of CUDA, cuBLASLt or cuDNN, and counts calls, while it exists.
  /// One at a time.
  class Refusal {
   public:
    /// `number`: the refused call, from 0. An empty `call` only counts.
    explicit Refusal(std::string call = "", int number = 0);
    ~Refusal();
    Refusal(const Refusal&) = delete;
    Refusal& operator=(const Refusal&) = delete;
    /// Numbers of calls so far, by function.
    [[nodiscard]] std::map<std::string, int> calls() const;
  };
  /// Counts a call. Returns whether it is refused.
  static bool refuses(const char* call);
  /// Counts a call of CUDA. Returns the code of its refusal, or the fault of the GPU.
  static cudaError_t answer(const char* call);

  /// Number of kernels until one fails as on an illegal address; negative: none does. All later
  /// calls then return that error.
  static inline std::atomic<int> kernels_until_fault = -1;
  static inline std::atomic<cudaError_t> fault = cudaSuccess;

  /// Memory of the GPUs, and the part of it that cuBLASLt and cuDNN take when they start on one.
  static inline std::atomic<std::size_t> memory = std::size_t{1} << 33U;
  static inline std::atomic<std::size_t> library_memory = 0;
  /// The GPUs on which each library has started, and those whose memory they have taken; a bit for
  /// each GPU.
  static inline std::atomic<std::uint64_t> started_cublaslt = 0;
  static inline std::atomic<std::uint64_t> started_cudnn = 0;
  static inline std::atomic<std::uint64_t> with_library_memory = 0;
  /// Takes the libraries' memory on the current GPU. Returns false if there is not enough, or on
  /// the first start of this library there inside a step, which allocates.
  static bool start_library(std::atomic<std::uint64_t>& started);
  /// Memory that the libraries take on all GPUs.
  static std::size_t taken_by_libraries();
  /// Returns the calling thread's current GPU. Not a call of CUDA.
  static int current();
  /// Whether GPUs can access each other's memory, what enabling that returns, and whether direct
  /// copies are lost.
  static inline std::atomic<bool> peers = true;
  static inline std::atomic<cudaError_t> peers_enabling = cudaSuccess;
  static inline std::atomic<bool> peers_lose_copies = false;
  static cudaError_t enable_peer(int own, int peer);
  static cudaError_t disable_peer(int own, int peer);
  static bool loses_copies(int from, int to);
  /// Bytes copied between GPUs so far.
  static inline std::atomic<std::size_t> copied_to_peers = 0;
  /// Objects that exist: streams and events.
  static std::size_t objects();

  /// Number of an old GPU; negative if there is none. Compute capability of this GPU, times ten.
  static inline std::atomic<int> old_gpu = -1;
  static inline std::atomic<int> old_capability = 75;
  /// CUDA version that the driver supports, or a value that stands for the program's own. A driver
  /// that is too old reports no GPUs.
  static constexpr int kSameVersion = -1;
  static inline std::atomic<int> driver = kSameVersion;
  /// Whether the driver reports GPUs.
  static inline std::atomic<bool> has_gpus = true;
  /// Root folder of the driver's files, which by default has none.
  static inline std::string root = "/nonexistent";
  /// Reason why cuBLASLt cannot be loaded, which makes a GPU unusable; empty if it can.
  static inline std::string missing_library;
  /// Number of queries of streams and events that return "not ready".
  static inline std::atomic<int> busy_queries = 0;
  /// Size above which allocations fail.
  static inline std::atomic<std::size_t> most_at_once = SIZE_MAX;

  /// A piece of host memory.
  struct Piece {
    std::byte* start;
    std::size_t size;
    int gpu;  ///< that registered it
  };
  /// Registered ranges by address.
  static std::vector<Piece> registered();
  /// Number of registrations that succeed before all others fail; negative: no limit.
  static inline std::atomic<int> registrations_left = -1;
  /// The error of those others, a cudaError_t.
  static inline std::atomic<int> registration_error = 2;  // cudaErrorMemoryAllocation
  /// Set to true by every registration, unless null.
  static inline std::atomic<std::atomic<bool>*> told_of_registrations = nullptr;
  /// Number of calls of cudaHostUnregister that failed.
  static inline std::atomic<int> refused_unregistrations = 0;

  /// While one exists, calls that allocate or free memory and first launches of kernels are refused
  /// and counted: they may wait for all work of a GPU, and in a step that work may wait for another
  /// rank.
  class NoAllocation {
   public:
    NoAllocation() { ++existing_; }
    ~NoAllocation() { --existing_; }
    NoAllocation(const NoAllocation&) = delete;
    NoAllocation& operator=(const NoAllocation&) = delete;
    /// Number of refused calls in this process.
    static inline std::atomic<int> refused = 0;
    [[nodiscard]] static bool exists() { return existing_ > 0; }

   private:
    static inline std::atomic<int> existing_ = 0;
  };

  /// Value of CUDA_DEVICE_MAX_CONNECTIONS when the process first used CUDA. Empty if it was not
  /// set.
  static std::string connections_at_start();

  /// Allocations of cudaMallocHost that were not freed.
  static inline std::atomic<int> host_allocations = 0;
  /// Number of calls that allow kernels more shared memory; calls for more bytes fail.
  static inline std::atomic<int> shared_memory_calls = 0;
  static inline std::atomic<std::size_t> most_shared_memory = SIZE_MAX;
  /// The GPU on which these calls wait until another GPU has had one; negative: none.
  static inline std::atomic<int> shared_memory_waits_on = -1;
  /// Waits after the call with this number.
  static void await_shared_memory_of_others(int call);
  /// The GPU's clock, which only fakes of kernels advance.
  static inline std::atomic<double> milliseconds = 0.0;
  /// Number of calls with a stream or an event of another device than the thread's current one,
  /// which fail.
  static inline std::atomic<int> wrong_device = 0;
  /// Bytes copied so far.
  static inline std::atomic<std::size_t> copied_to_device = 0;
  static inline std::atomic<std::size_t> copied_to_host = 0;
};

}  // namespace ballast::test
